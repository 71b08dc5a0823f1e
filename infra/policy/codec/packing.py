"""What a thread of the codec keeps: zstd's contexts, of which one takes longer to make than to use, and room for rows."""

import threading

import numpy as np
import zstandard

_kept = threading.local()
_SCRATCH = 8 * 2**20
"""Bytes of a row up to which it is kept."""


def pack(data: bytes, level: int) -> bytes:
    """One zstd frame that says its content's size."""
    compressors: dict[int, zstandard.ZstdCompressor] = _kept.__dict__.setdefault("compressors", {})
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level)
    return compressors[level].compress(data)


def unpack(data: memoryview) -> bytes:
    """The inverse. ValueError when the data is damaged."""
    if "decompressor" not in _kept.__dict__:
        _kept.decompressor = zstandard.ZstdDecompressor()
    try:
        return _kept.decompressor.decompress(data)
    except (zstandard.ZstdError, MemoryError) as error:  # it may say any size
        raise ValueError(str(error) or "a packed part is damaged") from error


def scratch(name: str, dtype: type | np.dtype, size: int) -> np.ndarray:
    """The thread's own `size` numbers, good until it asks for `name` again: had anew from the system for each row, memory
    cost a tenth of the time of coding it."""
    dtype = np.dtype(dtype)
    rows: dict[tuple[str, np.dtype], np.ndarray] = _kept.__dict__.setdefault("rows", {})
    row = rows.get((name, dtype))
    if row is None or len(row) < size:
        row = np.empty(size, dtype)
        if row.nbytes <= _SCRATCH:
            rows[name, dtype] = row
    return row[:size]
