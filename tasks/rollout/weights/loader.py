"""A policy's tensors, by their checkpoint names, into and out of a vLLM model in place.

`load`, `export` and `find_slots` run inside each vLLM worker (`LLM.collective_rpc`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from infra.errors import BadInput
from infra.models import checkpoint
from tasks.rollout.weights.slots import Slot, experts, slots_of


def collect(
    tensors: Iterable[tuple[str, torch.Tensor]], expected: dict[str, tuple[int, ...]]
) -> list[tuple[str, torch.Tensor]]:
    """Every expected tensor once, before any is loaded: an iterator that fails half-way leaves the engine as it was.

    Holds references, no copies. Raises BadInput that names an unknown, repeated, misshapen, non-float or missing tensor.
    """
    collected: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name not in expected:
            raise BadInput(f"policy tensor {name!r}: the model has none of that name")
        if name in collected:
            raise BadInput(f"policy tensor {name!r}: given twice")
        if tuple(tensor.shape) != expected[name]:
            raise BadInput(f"policy tensor {name!r}: shape {list(tensor.shape)}, the model's is {list(expected[name])}")
        if not tensor.is_floating_point():
            raise BadInput(f"policy tensor {name!r}: {tensor.dtype}, a floating point tensor is expected")
        collected[name] = tensor
    if missing := sorted(expected.keys() - collected.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadInput(f"policy tensor {missing[0]!r}{more}: missing")
    return list(collected.items())


def know_the_models_own_files() -> None:
    """vLLM tells from the tensors of every *.safetensors of a folder which dtype a model has and whether its head is tied:
    make it look at the model's alone, of which the copy of a tied embedding is none.

    A head that vLLM had untied for such a copy would be a parameter that no version writes.

    Patches vLLM 0.30.0, transformers_utils/config.py, _read_safetensors_metadata_in_dir. Seen:
    tests/integration/test_model_folders.py. Can go: when vLLM reads a folder's index there.
    """
    import vllm.transformers_utils.config as reader

    every: Any = reader._read_safetensors_metadata_in_dir
    if hasattr(every, "__wrapped__"):
        return

    @functools.wraps(every)
    def of_the_model(folder: Path) -> dict[str, Any]:
        try:
            held = checkpoint.weights(folder)
        except BadInput:  # of a server that is not ours: as vLLM has it
            return every(folder)
        return {name: {"dtype": weight.dtype, "shape": list(weight.shape)} for name, weight in held.items()}

    reader._read_safetensors_metadata_in_dir = of_the_model  # ty: ignore[invalid-assignment]


@torch.no_grad()
def load(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load a full policy over the worker's model. Each parameter keeps its memory and its dtype.

    Linear layers and embeddings are copied into. Layers whose kernels hold another layout than the checkpoint (experts;
    everything when the model is quantized or uses latent attention) go through vLLM's reload, which lays them out anew.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, config = worker.model_runner.model, worker.model_runner.model_config
    roots = [model] if config.quantization or config.use_mla else [module for _, module in experts(model)]
    with torch.device(worker.device):
        for root in roots:
            initialize_layerwise_reload(root)
        try:
            model.load_weights(iter(tensors))
        finally:
            for root in roots:
                finalize_layerwise_reload(root, config)


def export(worker: Any, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's parameters under the checkpoint's names and shapes, in the engine's dtype; views where possible.

    For one worker that holds the whole model (no tensor or pipeline parallelism). Raises BadInput that names a tensor
    whose place in the model it does not know.
    """
    slots = slots_of(worker.model_runner.model)
    for name in names:
        if name not in slots:
            raise BadInput(f"tensor {name!r}: not found in the engine's model")
        yield name, slots[name].read()


def find_slots(worker: Any) -> dict[str, Slot]:
    """Where checkpoint tensors lie in the worker's model; empty when kernels keep them in layouts of their own."""
    from vllm.distributed import get_tensor_model_parallel_rank

    config = worker.model_runner.model_config
    if config.quantization or config.use_mla:
        return {}
    return slots_of(worker.model_runner.model, get_tensor_model_parallel_rank())


def load_all_or_nothing(call: Callable[..., list[Any]], tensors: list[tuple[str, torch.Tensor]]) -> None:
    """`load` in every worker; when it fails in one, all get their old parameters back and its fault is raised.

    `call(function, args=...)` runs a function in every worker (`LLM.collective_rpc`). The old parameters are kept on the
    host meanwhile.
    """
    faults = call(_load_and_keep, args=(tensors,))
    call(_settle, args=(any(faults),))
    raise_first(faults)


type Faults = list[Exception]
"""What failed in a worker, one or none. In a list: of a worker that raises, or returns an exception as it is, vLLM reads the
reply and no other worker's, which then pass for those of the next call."""


def raise_first(faults: list[Faults]) -> None:
    """Raise the first of what all workers returned, if there is any."""
    for fault in (fault for of_worker in faults for fault in of_worker):
        raise fault


@torch.no_grad()
def _load_and_keep(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> Faults:
    model = worker.model_runner.model
    worker.policy_before = {name: p.data.to("cpu", copy=True) for name, p in model.named_parameters()}
    try:
        load(worker, tensors)
    except Exception as error:
        return [error]
    return []


@torch.no_grad()
def _settle(worker: Any, restore: bool) -> None:
    before = worker.__dict__.pop("policy_before")
    if restore:
        for name, parameter in worker.model_runner.model.named_parameters():
            parameter.data.copy_(before[name])
