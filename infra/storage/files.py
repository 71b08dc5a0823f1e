"""file:// for infra/storage/store.py: names appear by link or rename when their content is on the disk, never before."""

import errno
import fcntl
import glob
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress

from infra.errors import BadInput, NoRoom
from infra.storage import disk
from infra.storage.backend import Buffer

_NO_PLACE = {errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EOPNOTSUPP}
"""What the system says of a path under which nothing can ever be written."""

_TEMPORARY = re.compile(r"(.*)/\.([^/]+)\.[0-9a-f]{32}\.tmp")
"""What `open` writes to: folder and name of the file that it will be."""
_CHANGED = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}
"""What the system says of a folder in which others write or delete."""


class Files:
    """The backend of file://; paths are absolute. Names that begin with a dot are its own: temporary files, locks."""

    def read(self, path: str) -> Buffer:
        """The whole file as a private map: writable, changes never reach the file."""
        with _access(path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""

    def size(self, path: str) -> int | None:
        """Bytes of the file, None when there is none."""
        with _access(path):
            return os.path.getsize(path) if os.path.isfile(path) else None

    def open(self, path: str) -> "_FileSink":
        """Begin a file."""
        folder = os.path.dirname(path)
        with _access(path):
            _make_folder(folder)
            if os.path.exists(path):
                raise FileExistsError(path)
            return _FileSink(f"{folder}/.{os.path.basename(path)}.{uuid.uuid4().hex}.tmp", path)

    def put(self, path: str, data: bytes) -> None:
        """Rename a finished file over the name."""
        with self._temporary(path, data) as temporary:
            os.rename(temporary, path)

    def create(self, path: str, data: bytes) -> bool:
        """Link a finished file to the name, if it is free."""
        with self._temporary(path, data) as temporary:
            try:
                os.link(temporary, path)  # fails when the name is taken, whoever took it
            except FileExistsError:
                return False
        return True

    def replace(self, path: str, data: bytes, expected: bytes) -> bool:
        """Compare, then rename a finished file over the name, under a lock."""
        folder, name = os.path.split(path)
        if not os.path.isdir(folder):
            return False
        with _access(path), open(f"{folder}/.{name}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed, or its process dies
            try:
                if bytes(self.read(path)) != expected:
                    return False
            except FileNotFoundError:
                return False
            with self._temporary(path, data) as temporary:
                os.rename(temporary, path)
        return True

    @contextmanager
    def _temporary(self, path: str, data: bytes) -> Generator[str]:
        """A durable file beside `path` with its future content, gone afterwards; the folder is synced at the end."""
        folder = os.path.dirname(path)
        with _access(path):
            _make_folder(folder)
            temporary = f"{folder}/.{uuid.uuid4().hex}.tmp"
            try:
                sink = _FileSink(temporary)
                sink.write(data)
                sink.close()
                yield temporary
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            _sync_folder(folder)

    def keys(self, path: str) -> list[str]:
        """Paths of all files below a folder."""
        with _access(path):
            return [f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names]

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a folder."""
        with _access(path), suppress(FileNotFoundError), os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
        return []

    def uploads(self, path: str) -> list[str]:
        """Paths of files below a folder whose sink was not closed."""
        return [final for final, _ in self._uploads(path) if final != path]

    def abort(self, path: str) -> None:
        """Drop what sinks that were not closed have written of a file, or below a folder."""
        for _, temporary in self._uploads(path):
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _uploads(self, path: str) -> list[tuple[str, str]]:
        """(Path of the file that it will be, path of the temporary file)."""
        with _access(path):
            beside = f"{glob.escape(os.path.dirname(path))}/.*.tmp"
            names = self.keys(path) if os.path.isdir(path) else glob.glob(beside)
        found = [(f"{at[1]}/{at[2]}", name) for name in names if (at := _TEMPORARY.fullmatch(name))]
        return [(final, name) for final, name in found if final == path or final.startswith(f"{path}/")]

    def delete(self, path: str) -> None:
        """Remove a file, or a folder and all below."""
        self.abort(path)
        with _access(path):
            while os.path.lexists(path):
                try:
                    if os.path.isdir(path) and not os.path.islink(path):
                        shutil.rmtree(path)
                    else:
                        os.unlink(path)
                except OSError as error:
                    if error.errno not in _CHANGED:
                        raise


class _FileSink:
    """Writes the file `path`, which gets its name `final` (None: keeps its own) when it is closed."""

    def __init__(self, path: str, final: str | None = None):
        self._path, self._final = path, final or path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close or abort

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        written = 0
        with self._dropped_when_full():
            while written < len(view):  # a raw write takes at most 2 GiB
                written += self._file.write(view[written:])
        return written

    def close(self) -> None:
        with self._dropped_when_full():
            with self._file:
                os.fsync(self._file.fileno())  # file systems over a network tell here what did not fit
            if self._final != self._path:
                os.rename(self._path, self._final)
            _sync_folder(os.path.dirname(self._path))

    def abort(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    @contextmanager
    def _dropped_when_full(self) -> Generator[None]:
        """Give back at once what was written of a file that does not fit: others need the room, this one's retry too."""
        try:
            with _access(self._final):
                yield
        except NoRoom:
            self.abort()
            raise


def _make_folder(folder: str) -> None:
    """makedirs whose new names survive a power cut."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    for _ in range(100):  # another may be deleting the parent, again and again
        _make_folder(parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            return
        except FileNotFoundError:
            continue
        _sync_folder(parent)
        return
    raise BadInput(f"file://{folder}: no folder can be made in {parent}; choose another store")  # as /proc says


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _access(path: str) -> Generator[None]:
    try:
        yield
    except PermissionError as error:
        raise BadInput(f"file://{path}: permission denied; give this user access or choose another store") from error
    except (NotADirectoryError, IsADirectoryError) as error:
        raise BadInput(f"file://{path}: there is a file where the key needs a folder, or the reverse") from error
    except OSError as error:
        if disk.is_full(error):
            raise disk.no_room(f"file://{path}", os.path.dirname(path), error) from error
        if error.errno not in _NO_PLACE:
            raise
        raise BadInput(f"file://{path}: {os.strerror(error.errno)}; choose another store or a shorter name") from error
