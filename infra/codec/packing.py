"""zstd for the small parts of frames: contexts are kept, for one takes longer to make than to use."""

import threading

import zstandard

_kept = threading.local()


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
