"""Weight transfer of a stock vLLM server from the store, as a backend of vLLM's own: `policyflow`.

    python -m vllm.entrypoints.openai.api_server --model FOLDER --weight-transfer-config '{"backend": "policyflow"}'

(with VLLM_SERVER_DEV_MODE=1 for the endpoints). A version is named by its ArtifactRef, as JSON. `init_info
{"prefetch": ref}` has each worker read, decode and verify it beside its work, as often as one likes; `update_info
{"ref": ref}` then writes what changed. No trainer takes part, and a failed update leaves the worker's old weights. Versions
that are no model's own weights, adapters and MXFP8's elements and scales, are refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from infra.errors import BadInput
from infra.models.checkpoint import checkpoint_shapes
from infra.numerics.mxfp8 import SCALE
from infra.policy import follow
from infra.policy.version import describe
from infra.storage.artifacts import ArtifactRef
from tasks.rollout.weights.model_sink import ModelSink

if TYPE_CHECKING:
    import torch

BACKEND = "policyflow"


@dataclass
class StoreInit(WeightTransferInitInfo):
    """What `init_weight_transfer_engine` takes."""

    prefetch: dict[str, str] | None = None
    """A version to prepare; None: nothing."""


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):
    """What `update_weights` takes."""

    ref: dict[str, str]
    """The version: kind, uri and digest."""


class StoreWeightTransferEngine(WeightTransferEngine[StoreInit, StoreUpdate]):
    """Brings one worker's model to versions in the store."""

    init_info_cls = StoreInit
    update_info_cls = StoreUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: "torch.device", model: "torch.nn.Module"):
        super().__init__(config, vllm_config, device, model)
        self._sink: ModelSink | None = None

    @property
    def sink(self) -> ModelSink:
        """The model; made when it is first needed, for its kernels have laid it out by then."""
        if self._sink is None:
            folder = self.model_config.model
            if not Path(folder).is_dir():
                raise BadInput(f"model {folder}: weight transfer from the store needs a folder of safetensors")
            self._sink = ModelSink(_Worker(self.model, self.model_config, self.device), checkpoint_shapes(folder))
        return self._sink

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        """Prepare `init_info.prefetch` in the background."""
        if init_info.prefetch is not None:
            follow.prefetch(self.sink, _of_weights(init_info.prefetch))

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Come to the version; the writes are done when this returns."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StoreUpdate) -> None:
        """Come to the version `update_info.ref`, or raise and keep the old weights."""
        follow.follow(self.sink, _of_weights(update_info.ref))

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Nothing is held open."""


def _of_weights(named: dict[str, str]) -> ArtifactRef:
    """The ref of a version that a stock model can hold, else BadInput."""
    ref = ArtifactRef.model_validate(named)
    what = describe(ref)
    if what.form == "adapter":
        raise BadInput(
            f"{ref.uri} is an adapter: weight transfer replaces the model's own weights; load it by vLLM's "
            "load_lora_adapter from a folder (publish with adapter_folder=...)"
        )
    if quantised := sorted(name for name in what.tensors if name + SCALE in what.tensors):
        raise BadInput(
            f"{ref.uri} is in MXFP8 ({quantised[0]} comes with scales): a stock server cannot take it by weight transfer; "
            "serve the folder that the publish flow makes of it"
        )
    return ref


class _Worker:
    """What tasks/rollout/weights/loader.py needs of a vLLM worker."""

    def __init__(self, model: "torch.nn.Module", model_config: Any, device: "torch.device"):
        self.model_runner = self
        self.model, self.model_config, self.device = model, model_config, device
