"""Tensors as safetensors files: written from the tensors' own memory, read as views of the file's bytes."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from infra.errors import BadInput
from infra.numerics.tensors import DTYPES, NAMES, tensor_bytes
from infra.storage.backend import Buffer

SHARD_BYTES = 256 * 2**20


def shards(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Groups of at most `limit` bytes (or of one bigger tensor), in the order of `tensors`.

    Holds one group, so an iterator must not reuse the memory of what it has yielded."""
    seen: set[str] = set()
    group: dict[str, Tensor] = {}
    held = 0
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    for name, tensor in cast(Iterable[tuple[str, Tensor]], pairs):
        if name in seen or name == "__metadata__" or tensor.dtype not in NAMES or tensor.layout != torch.strided:
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
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
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
