"""Where `precision: auto` is decided."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_precision(name: str) -> torch.dtype:
    """The dtype of weights and activations for UpdateConfig.precision.

    bfloat16 pays only where the device multiplies it in hardware: on a CPU with plain AVX2 a bf16 matmul runs at about
    a seventh of fp32's speed.
    """
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if torch.cuda.is_available() or _cpu_multiplies_bf16() else torch.float32


def _cpu_multiplies_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
