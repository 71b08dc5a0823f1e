"""The policy's adapter in vLLM: the settings of an engine that serves one, and its replacement in place.

`_load` and `_settle` run inside each vLLM worker (`LLM.collective_rpc`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infra.policy.adapters import MODULES, LoraConfig, check_tuned_configs
from tasks.rollout.tuned import FOLDER_ENV
from tasks.rollout.weights import loader

NAME, ID = "policy", 1
"""Every version of the adapter has this name and id: vLLM never holds two."""


@dataclass(frozen=True)
class AdapterUpdate:
    """An adapter, checked and ready to be loaded."""

    tensors: dict[str, torch.Tensor]
    """PEFT's names, 2-D layout."""
    config: dict[str, Any]
    """PEFT's adapter_config.json."""


def engine_arguments(config: LoraConfig, has_experts: bool, tensor_parallel: int) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM for an engine that serves one adapter of this kind to every request.

    - One slot: vLLM's kernels look for each token's adapter among max_loras + 1, and reserve memory for all.
    - The smallest rank that fits: A and B are padded to max_lora_rank, and the padding is multiplied.
    - Only the adapted modules are wrapped; by default vLLM also puts an adapter on embeddings and logits, whose product
      over the vocabulary costs most of a small model's step.
    - CUDA graphs for the number of adapters that are there (one) instead of max_loras + 1.
    - A and B both split over tensor-parallel ranks where they are large.
    Experts get the kernels that vLLM has for adapters: FlashInfer's on Blackwell, Triton's elsewhere (it asks the device).
    """
    modules = sorted({module for target in config.targets for module in _of_target(target)})
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": config.engine_rank,
        "specialize_active_lora": True,
        "fully_sharded_loras": fully_sharded(config, tensor_parallel),
        "lora_target_modules": [*modules, *(["experts"] if has_experts else [])],
    }
    if has_experts and config.experts == "shared_outer":
        arguments["enable_moe_shared_loras"] = True
    return arguments


def fully_sharded(config: LoraConfig, tensor_parallel: int) -> bool:
    """Whether a rank holds its part of A and B only (S-LoRA): worth its gather from rank 64 on."""
    return tensor_parallel > 1 and config.engine_rank >= 64


def _of_target(target: str) -> tuple[str, ...]:
    leaf = target.rpartition(".")[2]
    return MODULES.get(leaf) or tuple(module for modules in MODULES.values() for module in modules)


def prepare_environment(config: LoraConfig, tensor_parallel: int) -> None:
    """Before vLLM is imported; what the user has set stays.

    An engine with an adapter runs our Beam (vLLM's own takes none). On a GPU the adapter's small products run beside the
    layer's on a second stream (not together with fully sharded ones), with the tile sizes of `tuned_configs`.
    """
    os.environ.setdefault("BEAM_VLLM", "portable")
    if config.tuned_configs is not None:
        check_tuned_configs(config)  # again: an engine may run on another machine than the flow
        os.environ.setdefault(FOLDER_ENV, str(Path(config.tuned_configs).absolute()))
    if torch.cuda.is_available() and not fully_sharded(config, tensor_parallel):
        os.environ.setdefault("VLLM_LORA_ENABLE_DUAL_STREAM", "1")


def request() -> Any:
    """What each request of an engine with an adapter carries. The path is never read: the adapter is in memory."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, ID, "in-memory")


def replace(call: Callable[..., list[Any]], update: AdapterUpdate) -> None:
    """Put an adapter in the place of the one that every worker has; when it fails in one, all have the old one again, and
    its fault is raised.

    `call(function, args=...)` runs a function in every worker (`LLM.collective_rpc`).
    """
    faults = call(_load, args=(update.tensors, update.config))
    call(_settle, args=(any(faults),))
    loader.raise_first(faults)


def _load(worker: Any, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> loader.Faults:
    """Load an adapter (2-D layout, PEFT's names) in the place of the one that is there, which is kept until `_settle`.

    vLLM folds alpha / rank into the B that it is given, in place: it gets copies, so that tensors loaded twice are
    scaled once.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    workers = worker.model_runner.lora_manager
    manager = workers._adapter_manager
    worker.adapter_before = manager.get_adapter(ID)
    try:
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(workers.lora_config)
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ID,
            {name: tensor.clone() for name, tensor in tensors.items()},
            helper,
            device="cpu",
            dtype=workers.lora_config.lora_dtype,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        )
        manager.remove_adapter(ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ID)
    except Exception as fault:
        return [fault]
    return []


def _settle(worker: Any, restore: bool) -> None:
    """Forget the adapter before, or put it back: laid out for the kernels already, as vLLM keeps it."""
    before = worker.__dict__.pop("adapter_before")
    if not restore:
        return
    manager = worker.model_runner.lora_manager._adapter_manager
    manager.remove_adapter(ID)
    if before is not None:
        manager._registered_adapters[ID] = before
        manager.activate_adapter(ID)
