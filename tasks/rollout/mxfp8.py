"""MXFP8 in vLLM: its own kernels on GPUs that have the units, the same numbers in fp32 on a CPU.

A version's weights come as elements and scales and are handed to vLLM as the numbers that those stand for, exactly; vLLM's
MXFP8 quantises them again on a GPU, to the same numbers. Activations are rounded in front of each product.
The emulation is tasks/rollout/vllm_cpu/mxfp8.py's.
"""

import os
from typing import Any

from infra.errors import BadInput
from infra.numerics.mxfp8 import Mxfp8Config

PLAIN_EXPERTS_ENV = "POLICYFLOW_PLAIN_EXPERTS"
"""Set for engines whose experts must not go through vLLM's fused CPU kernel; its worker processes inherit it."""


def engine_arguments(config: Mxfp8Config) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM. BadInput when the device has no MXFP8 units and no emulation was asked for."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        if not config.emulation:
            raise BadInput("precision mxfp8: this machine has no GPU with MXFP8 units; set mxfp8.emulation: true")
        return {}
    if not current_platform.has_device_capability(100):
        name = current_platform.get_device_name()
        raise BadInput(f"precision mxfp8: {name} has no MXFP8 units (Blackwell and later do)")
    return {"quantization": "mxfp8", "quantization_config": {"ignore": _ignored(config)}}


def _ignored(config: Mxfp8Config) -> list[str]:
    """The patterns in vLLM's terms: projections that it holds as one matrix have its name."""
    stacked = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    stacked |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    own = [pattern.rpartition(".") for pattern in config.high_precision]
    return sorted({f"{path}{dot}{stacked.get(leaf, leaf)}" for path, dot, leaf in own} | set(config.high_precision))


def prepare_environment(config: Mxfp8Config) -> None:
    """Before vLLM builds its model."""
    if config.emulation:
        os.environ[PLAIN_EXPERTS_ENV] = "1"
    else:
        os.environ.pop(PLAIN_EXPERTS_ENV, None)
