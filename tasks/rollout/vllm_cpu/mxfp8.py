"""MXFP8's numbers in fp32, for a vLLM without the units: `emulate` runs inside each worker (`LLM.collective_rpc`).

Patches vLLM 0.30.0, LinearBase.cpu_linear and the experts of vllm_cpu/experts.py.
Fault: `quantization="mxfp8"` lists no kernel for CPUs; its emulation kernel dequantises a layer at every call.
Seen: the engine does not load. Proof: tests/integration/test_mxfp8.py.
Can go: when vLLM's EmulationMxfp8LinearKernel is listed for CPUs, for experts too, and is as fast.
"""

from typing import Any

import torch
from torch import Tensor

from infra.numerics.mxfp8 import rounded


def emulate(worker: Any, names: set[str]) -> None:
    """Have the layers whose weights are made of `names` (checkpoint tensors) multiply in MXFP8, dense and of experts.

    Also rounds the weights that are there: those of an engine with an adapter come from the model folder, not from a
    version.
    """
    from vllm.model_executor.layers.linear import LinearBase

    from tasks.rollout.weights.loader import experts

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
