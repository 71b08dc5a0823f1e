"""The body of an engine's actor: it builds the engine, brings it to versions and runs functions on it."""

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

from infra.engines.caches import move_caches
from infra.engines.spec import EngineSpec
from infra.storage.artifacts import ArtifactRef


class Resident:
    """The actor's body. Ray runs one call at a time, so an engine never sees two."""

    def __init__(self, spec: EngineSpec[Any]):
        os.environ.update(spec.environment)
        move_caches()  # of this node: on a cluster it is another than the flow's
        keep_freed_memory()
        self.spec = spec
        self.engine: Any = None

    def load(self) -> int:
        """Build the engine (once); returns the process id, which the recovery tests kill."""
        if self.engine is None:
            self.engine = self.spec.loader.load()
            gc.collect()
            give_back_memory()
        return os.getpid()

    def call(
        self, function: Callable[..., Any], version: ArtifactRef | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Bring the engine to `version` (None: as it is), then return `function(engine, *args, **kwargs)`."""
        self.load()
        try:
            if version is not None:
                self.spec.loader.follow(self.engine, version)
            return function(self.engine, *args, **kwargs)
        finally:
            give_back_memory()  # engines take turns: what one needs for its own, the other has in the meantime


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: by default it returns blocks above 32 MiB to the system at once, and every large
    temporary tensor costs a page fault for each of its 4 KiB pages again. A no-op where there is no glibc."""
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


def give_back_memory() -> None:
    """Return what has been freed to the system; `keep_freed_memory` would keep it for ever."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
