"""Dtypes by their names, and a tensor's bytes."""

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""As safetensors names them."""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, `float8_e4m3fn`, ..."""
    return str(dtype).removeprefix("torch.")


def multiplies_bf16() -> bool:
    """Whether this machine's device does so in hardware; a CPU without such units takes a multiple of fp32's time."""
    on_cpu = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cuda.is_available() or on_cpu


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The contiguous tensor's bytes, row-major, little-endian, whatever its dtype; no copy when it is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()).cast("B")
