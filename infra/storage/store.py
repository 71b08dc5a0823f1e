"""Objects under a URL: a folder of this machine (file://) or a bucket (s3://), the same calls and guarantees.

An object is written whole or not at all, and never seen half-written. `create` and `replace` are atomic: among racing
callers, on any machine, one wins. Artifacts (infra/storage/artifacts.py) are made of these calls.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from infra.errors import BadInput
from infra.storage.backend import Backend, Buffer, Sink
from infra.storage.urls import address, local_path

_MAX_KEY_BYTES = 900  # S3 allows 1,024 with the prefix
_MAX_PART_BYTES = 200  # file systems allow 255; temporary files need some of it
_BAD_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")


@dataclass(frozen=True)
class Store:
    """A root URL. Holds nothing open, so it is cheap to build, to pickle and to send.

    Credentials and the endpoint of s3:// come from the environment as botocore reads them (AWS_ENDPOINT_URL,
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ...) and are never part of a URL.

    Errors of every call: BadInput (a bad key, access refused, no such bucket), Transient (the network or the server
    failed, after retries), FileNotFoundError.
    """

    url: str
    """Absolute, without a trailing slash: file:///folder or s3://bucket/prefix. Nothing in it is percent-encoded
    (infra/storage/urls.py): `%20` are three characters of a name."""

    @classmethod
    def at(cls, url: str) -> "Store":
        """`outputs/x` (a folder, relative or absolute), `file:///folder` or `s3://bucket/prefix`."""
        if not url or _BAD_CHARACTERS.search(url):
            raise BadInput(f"store URL {url!r}: expected a folder, file:///folder or s3://bucket/prefix")
        scheme, separator, rest = url.partition("://")
        if not separator:
            if (folder := os.path.expanduser(url)).startswith("~"):
                raise BadInput(f"store URL {url!r}: there is no user {url.partition('/')[0][1:]!r} with a home folder")
            return cls(address(folder))
        if scheme == "file" and rest.startswith("/"):
            return cls(address(rest))
        if scheme == "s3" and rest.strip("/"):
            bucket, _, prefix = rest.rstrip("/").partition("/")
            if re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
                return cls(f"s3://{bucket}/{check_key(prefix)}" if prefix else f"s3://{bucket}")
        raise BadInput(f"store URL {url!r}: expected a folder, file:///folder or s3://bucket/prefix")

    def __truediv__(self, key: str) -> "Store":
        """The store one folder down."""
        return Store(self.uri(key))

    def uri(self, key: str) -> str:
        """The URL of a key."""
        return f"{self.url.rstrip('/')}/{check_key(key)}"

    @property
    def is_local(self) -> bool:
        """Whether `path` names files of this machine."""
        return local_path(self.url) is not None

    @property
    def backend(self) -> Backend:
        """The kind of storage behind the URL."""
        if self.is_local:
            from infra.storage.files import Files

            return Files()
        from infra.storage.s3 import connect  # s3fs costs half a second to import

        return connect()

    def path(self, key: str) -> str:
        """The key's path as the backend names it; for file:// this is the path of a file."""
        return self.uri(key).partition("://")[2]

    def read(self, key: str) -> bytes:
        """The whole object. Raises FileNotFoundError."""
        return bytes(self.backend.read(self.path(key)))

    def buffer(self, key: str) -> Buffer:
        """The whole object without a copy: for file:// a private writable map, whose changes never reach the file."""
        return self.backend.read(self.path(key))

    def size(self, key: str) -> int | None:
        """Bytes of the object, None when there is none."""
        return self.backend.size(self.path(key))

    def open(self, key: str) -> Sink:
        """Begin a new object, written in pieces, under a name that nobody has used (FileExistsError on file://) but for
        the same content."""
        return self.backend.open(self.path(key))

    def put(self, key: str, data: bytes) -> None:
        """Write the whole object, over what may be there; readers see the old or the new one, never a mixture."""
        self.backend.put(self.path(key), data)

    def create(self, key: str, data: bytes) -> bool:
        """Put `data` if there is no such object. False, and nothing changed, when there is one."""
        return self.backend.create(self.path(key), data)

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """Compare and swap, for small pointer objects: put `data` if the object is `expected` (None: absent)."""
        if expected is None:
            return self.create(key, data)
        return self.backend.replace(self.path(key), data, expected)

    def keys(self, folder: str = "") -> list[str]:
        """Sorted keys of all objects below a folder of the store, as of now (no listing is cached)."""
        return self._keys(self.backend.keys, folder)

    def folders(self, folder: str) -> list[str]:
        """Sorted names of the folders that lie in a folder of the store, without a look into them."""
        return sorted(name for name in self.backend.folders(self.path(folder)) if _is_visible(name))

    def uploads(self, folder: str = "") -> list[str]:
        """Sorted keys of all objects below a folder whose upload has begun and not ended: it goes on, or its process died.
        What it has sent takes room, and is not seen by `keys`."""
        return self._keys(self.backend.uploads, folder)

    def _keys(self, found: Callable[[str], list[str]], folder: str) -> list[str]:
        root = self.url.partition("://")[2].rstrip("/")
        paths = found(self.path(folder) if folder else root or "/")
        return sorted({key for path in paths if _is_visible(key := path[len(root) + 1 :])})

    def abort(self, key: str) -> None:
        """Drop what the unfinished uploads of an object, or below a folder, have sent. One that goes on raises
        FileNotFoundError where it is."""
        self.backend.abort(self.path(key))

    def delete(self, key: str) -> None:
        """Remove an object, or a folder and all below it, and unfinished uploads. What is not there is fine."""
        self.backend.delete(self.path(key))


def check_key(key: str) -> str:
    """A key stays under its root and means the same on every backend, else BadInput."""
    parts = key.split("/")
    if not key or any(part == "" for part in parts):
        raise BadInput(f"key {key!r}: expected names separated by single slashes, none at the ends")
    if _BAD_CHARACTERS.search(key):
        raise BadInput(f"key {key!r}: control characters and backslashes are not allowed")
    if any(part.startswith(".") for part in parts):
        raise BadInput(f"key {key!r}: a name must not begin with a dot")
    if len(key.encode()) > _MAX_KEY_BYTES or any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        raise BadInput(f"key {key!r}: longer than {_MAX_KEY_BYTES} bytes, or a name longer than {_MAX_PART_BYTES}")
    return key


def _is_visible(key: str) -> bool:
    return not any(part.startswith(".") for part in key.split("/"))
