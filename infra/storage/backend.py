"""What a kind of store must do: files of this machine (files.py), a bucket (s3.py)."""

import mmap
from typing import Protocol

Buffer = bytes | bytearray | memoryview | mmap.mmap


class Sink(Protocol):
    """A file being written: invisible or unfinished until `close`, which makes it durable."""

    def write(self, data: Buffer) -> int:
        """Append."""
        ...

    def close(self) -> None:
        """Finish; durable when it returns."""
        ...

    def abort(self) -> None:
        """Drop what was written."""
        ...


class Backend(Protocol):
    """What Store needs of a kind of storage; paths are absolute (`/folder/x`, `bucket/x`)."""

    def read(self, path: str) -> Buffer:
        """As Store.buffer."""
        ...

    def size(self, path: str) -> int | None:
        """As Store.size."""
        ...

    def open(self, path: str) -> Sink:
        """As Store.open."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """As Store.put."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """As Store.create."""
        ...

    def replace(self, path: str, data: bytes, expected: bytes) -> bool:
        """As Store.replace, `expected` given."""
        ...

    def keys(self, path: str) -> list[str]:
        """Paths of all objects below `path`, in any order."""
        ...

    def folders(self, path: str) -> list[str]:
        """As Store.folders."""
        ...

    def uploads(self, path: str) -> list[str]:
        """Paths of objects below `path` that are being uploaded, in any order."""
        ...

    def abort(self, path: str) -> None:
        """As Store.abort."""
        ...

    def delete(self, path: str) -> None:
        """As Store.delete."""
        ...
