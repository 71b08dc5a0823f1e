"""Where `precision: auto` and `weights: auto` are decided."""

import torch

from infra.numerics.tensors import multiplies_bf16

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_precision(name: str) -> torch.dtype:
    """The dtype of weights and activations for UpdateConfig.precision.

    bfloat16 pays only where the device multiplies it in hardware: on a CPU with plain AVX2 a bf16 matmul runs at about
    a seventh of fp32's speed.
    """
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if multiplies_bf16() else torch.float32


def weight_dtype(choice: str, compute: torch.dtype, in_folder: list[torch.dtype], router: bool) -> torch.dtype:
    """The dtype of a parameter's values for UpdateConfig.weights.

    `compute`: the dtype that Megatron holds the parameter in; `in_folder`: of the folder's tensors that make it up.
    A parameter held in bf16 has no other values; one held in fp32 may have those of bf16, which are exact in it.
    """
    if compute != torch.float32 or choice == "float32":
        return compute
    rounded = bool(in_folder) and all(dtype == torch.bfloat16 for dtype in in_folder)
    if choice == "bfloat16" and not router:
        rounded = True
    return torch.bfloat16 if rounded else torch.float32
