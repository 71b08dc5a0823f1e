"""Disks that are full: what the system says of one, in one line, whoever met it."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from infra.errors import BadInput, NoRoom

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the limit of a file's size",
}
_FULL_BYTES = 1 << 20
"""A disk with less room than this is taken for full: SQLite, for one, needs some for any write."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no room."""
    return isinstance(error, OSError) and error.errno in _FULL


def no_room(place: str, folder: str | os.PathLike[str], error: OSError) -> NoRoom:
    """The fault to raise where writing `place`, in `folder`, has met `error`."""
    return NoRoom(
        f"{place}: {_FULL[error.errno or errno.ENOSPC]} ({_left(folder)}); make room, and start the same run again"
    )


def full_places(places: Mapping[str, str | os.PathLike[str]]) -> list[str]:
    """Those of {what it holds: folder} that lie on a full disk, for a person."""
    found = []
    for what, folder in places.items():
        existing = _existing(folder)
        if shutil.disk_usage(existing).free < _FULL_BYTES:
            found.append(f"{Path(folder).absolute()} ({what}): the disk is full ({_left(existing)})")
    return found


def explained(error: BaseException, places: Mapping[str, str | os.PathLike[str]]) -> str | None:
    """In a line, that an error of whatever library comes from a full disk: it says so, or one of `places` (see
    `full_places`) is full now. None: it has another cause."""
    for cause in causes(error):
        if isinstance(cause, OSError) and is_full(cause):
            place = str(cause.filename or "a file")
            return str(no_room(place, os.path.dirname(place) if cause.filename else tempfile.gettempdir(), cause))
    found = full_places(places)
    return f"{'; '.join(found)}; make room, and start the same run again" if found else None


def require_writable(name: str, folder: str | os.PathLike[str]) -> None:
    """Make the folder that the environment variable `name` tells. BadInput when nothing can be written there."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        if is_full(error):
            raise no_room(f"{name} {folder}", folder, error) from None
        raise BadInput(
            f"{name} {folder}: nothing can be written there ({error.strerror}); set {name} to a folder that this user may write"
        ) from None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _left(folder: str | os.PathLike[str]) -> str:
    existing = _existing(folder)
    with suppress(OSError):
        usage = os.statvfs(existing)
        if usage.f_files and not usage.f_favail:
            return f"no file can be added, in {existing}"
        return f"{usage.f_bavail * usage.f_frsize / 2**20:.1f} MiB left in {existing}"
    return f"in {existing}"


def _existing(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return path
