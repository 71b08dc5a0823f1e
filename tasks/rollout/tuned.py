"""Tuned kernels: which files of `lora.tuned_configs` vLLM's Triton kernels would read, and what is told when they find none.

vLLM looks a file up by the device's name (and, for the experts' own products, by their number and size), and computes with
its defaults where there is none: a warning in a log that engines do not show.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tasks.rollout.weights.slots import experts

FOLDER_ENV = "VLLM_TUNED_CONFIG_FOLDER"
_ADAPTER = ("SHRINK", "EXPAND_TRUE", "EXPAND_FALSE")
_EXPERT_ADAPTER = tuple(f"FUSED_MOE_LORA_{layer}_{kind}" for layer in ("W13", "W2") for kind in ("SHRINK", "EXPAND"))
_log = logging.getLogger(__name__)


def wanted(worker: Any) -> list[str]:
    """Inside a vLLM worker: patterns of the files that the kernels of its model and device read; none on a CPU.

    Names are vLLM's (vllm/lora/ops/triton_ops/utils.py, vllm/model_executor/layers/fused_moe/fused_moe.py).
    """
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name

    if worker.device.type == "cpu":
        return []
    device = torch.cuda.get_device_name().replace(" ", "_").replace("-", "_")
    modules = [module for _, module in experts(worker.model_runner.model)]
    names = [f"{device}_{kernel}.json" for kernel in (*_ADAPTER, *(_EXPERT_ADAPTER if modules else ()))]
    shapes = {(module.w2_weight.shape[0], module.w2_weight.shape[2]) for module in modules}
    for count, size in sorted(shapes):  # a file for any dtype: the kernel's choice
        names.append(get_config_file_name(count, size, None).removesuffix(".json") + "*.json")
    return names


def tell_unused(call: Callable[..., list[Any]]) -> None:
    """Log which kernels find no file in the folder; `call(function)` runs a function in every worker."""
    folder = Path(os.environ[FOLDER_ENV])
    names = call(wanted)[0]
    missing = [name for name in names if not any(folder.glob(name))]
    if not names:
        _log.warning("lora.tuned_configs: nothing is tuned on a CPU; %s is not read", folder)
    elif len(missing) == len(names):
        text = "lora.tuned_configs: no file in %s is for this model and device, kernels keep their defaults (%s)"
        _log.warning(text, folder, ", ".join(missing))
    elif missing:
        _log.warning(
            "lora.tuned_configs: kernels without a file in %s keep their defaults (%s)", folder, ", ".join(missing)
        )
