"""MXFP8 in vLLM: its own kernels on GPUs that have the units, the same numbers in fp32 on a CPU.

A version's weights come as elements and scales and are handed to vLLM as the numbers that those stand for, exactly; vLLM's
MXFP8 quantises them again on a GPU, to the same numbers. Activations are rounded in front of each product.

`emulate` runs inside each vLLM worker (`LLM.collective_rpc`).
"""

import os
from typing import Any

import torch
from torch import Tensor

from infra.errors import BadInput
from infra.mxfp8 import Mxfp8Config, rounded

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
        name = torch.cuda.get_device_name()
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


def emulate(worker: Any, names: set[str]) -> None:
    """Have the layers whose weights are made of `names` (checkpoint tensors) multiply in MXFP8, dense and of experts.

    Also rounds the weights that are there: those of an engine with an adapter come from the model folder, not from a
    version.
    """
    from vllm.model_executor.layers.linear import LinearBase

    from tasks.rollout.weights import experts

    model = worker.model_runner.model
    stacked = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parent, _, leaf = name.replace(".base_layer", "").rpartition(".")
            parts = stacked.get(leaf, [leaf])
            if all(f"{parent}.{part}.weight" in names for part in parts):
                module.cpu_linear = rounding_linear
                module.weight.data.copy_(rounded(module.weight.data))
    for name, module in experts(model):
        path = name.replace(".base_layer", "").removesuffix(".routed_experts")
        if f"{path}.0.down_proj.weight" in names:
            module.quant_method.moe_kernel.fused_experts.rounds = True
            for weight in (module.w13_weight, module.w2_weight):
                weight.data.copy_(rounded(weight.data))


def rounding_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer of rounded inputs; `weight` holds values that MXFP8 has already."""
    return torch.nn.functional.linear(rounded(x), weight, bias)
