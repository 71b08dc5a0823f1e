"""Tensors as safetensors files: written from the tensors' own memory, read as views of the file's bytes."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from infra.errors import BadInput
from infra.store import Buffer

SHARD_BYTES = 256 * 2**20

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def shards(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Groups of at most `limit` bytes (or of one bigger tensor), in the order of `tensors`.

    Holds one group, so an iterator must not reuse the memory of what it has yielded."""
    seen: set[str] = set()
    group: dict[str, Tensor] = {}
    held = 0
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    for name, tensor in cast(Iterable[tuple[str, Tensor]], pairs):
        if name in seen or name == "__metadata__" or tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise BadInput(f"tensor {name!r} ({tensor.dtype}): repeated, or not dense, or no dtype of safetensors")
        seen.add(name)
        if group and held + tensor.nbytes > limit:
            yield group
            group, held = {}, 0
        group[name] = tensor
        held += tensor.nbytes
    if group or not seen:
        yield group


def write_safetensors(tensors: Mapping[str, Tensor], write: Callable[[Buffer], Any]) -> None:
    """One standard safetensors file, passed to `write` in pieces."""
    # Wide dtypes first keeps every tensor aligned in a mapped file, as the format's own writer does.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in ordered:
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        if tensor.nbytes:
            write(tensor_bytes(tensor))


def read_safetensors(data: Buffer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file's (verified) bytes, as views of them: they keep `data` alive."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + size]))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
        if begin == end:
            yield name, torch.empty(shape, dtype=dtype)
        else:
            count = (end - begin) // dtype.itemsize
            yield name, torch.frombuffer(data, dtype=dtype, count=count, offset=8 + size + begin).reshape(shape)


def checkpoint_shapes(model_dir: str) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every tensor in a folder's safetensors files: what a full policy of this model consists of."""
    return {name: tuple(entry["shape"]) for name, entry in _checkpoint_header(model_dir).items()}


def checkpoint_dtypes(model_dir: str) -> dict[str, torch.dtype]:
    """{name: dtype} of the same."""
    header = _checkpoint_header(model_dir)
    unknown = sorted({entry["dtype"] for entry in header.values()} - DTYPES.keys())
    if unknown:
        raise BadInput(f"model folder {model_dir}: tensors of dtype {unknown[0]}; known are {', '.join(DTYPES)}")
    return {name: DTYPES[entry["dtype"]] for name, entry in header.items()}


def _checkpoint_header(model_dir: str) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        tensors |= {name: entry for name, entry in header.items() if name != "__metadata__"}
    if not tensors:
        raise BadInput(f"model folder {model_dir}: no tensors in *.safetensors")
    return tensors
