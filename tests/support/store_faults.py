"""A store whose process dies at a chosen write: before it, or after it, so that only the reply is lost."""

import threading
from typing import Any

from infra.errors import Transient
from infra.storage.backend import Buffer
from infra.storage.files import Files


class Died(Transient):
    """The process is gone; nothing that it would have done afterwards happens."""


class DyingFiles(Files):
    """file:// until write number `at` (0: the first); from there on every call fails, until `revive`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.revive()

    def revive(self, at: int | None = None, replies: bool = True) -> None:
        """A new process. It dies at write `at` (None: never); replies False: that write happens, its reply is lost."""
        self.left, self.replies, self.dead = at, replies, False

    def _act(self, act: Any) -> Any:
        with self._lock:
            if self.dead:
                raise Died("the process is gone")
            if self.left == 0:
                self.dead = True
                if self.replies:
                    raise Died("before a write")
                act()
                raise Died("after a write")
            if self.left is not None:
                self.left -= 1
            return act()

    def read(self, path: str) -> Buffer:
        if self.dead:
            raise Died("the process is gone")
        return super().read(path)

    def open(self, path: str) -> Any:
        sink = self._act(lambda: super(DyingFiles, self).open(path))
        close = sink.close
        sink.close = lambda: self._act(close)
        return sink

    def put(self, path: str, data: bytes) -> None:
        self._act(lambda: super(DyingFiles, self).put(path, data))

    def create(self, path: str, data: bytes) -> bool:
        return self._act(lambda: super(DyingFiles, self).create(path, data))

    def replace(self, path: str, data: bytes, expected: bytes) -> bool:
        return self._act(lambda: super(DyingFiles, self).replace(path, data, expected))

    def delete(self, path: str) -> None:
        self._act(lambda: super(DyingFiles, self).delete(path))
