"""Resident engines: Ray actors that hold an engine for a whole run, found again or replaced when they are lost.

A task names a function and the policy version it needs; the actor brings its engine to that version and runs the
function on it. So a fresh engine, a restarted one and a warm one take the same path, and a flow holds no weights.
"""

import contextlib
import ctypes
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from infra.artifacts import ArtifactRef
from infra.config import Config
from infra.errors import BadInput, Lasting, OutOfMemory, Transient

NAMESPACE = "policyflow"
START_ATTEMPTS = 3

# Ray ends an actor when the last handle on it is gone: this process keeps one on each of its engines.
_handles: dict[str, Any] = {}


class EngineSpec(Config):
    """How to build a resident engine, as small JSON."""

    name: str
    """The actor's name, unique on the Ray cluster: <run>/<room>."""
    factory: str
    """`module:callable` that builds the engine from `settings`, inside the actor's process."""
    settings: dict[str, Any] = {}
    """Keyword arguments of the factory, JSON."""
    follow: str
    """`module:function(engine, ref)` that brings the engine to a version."""
    environment: dict[str, str] = {}
    """Environment variables of the actor's process, set before the engine's libraries are imported."""
    cpus: float = 1
    """CPU cores that Ray reserves. Engines take turns, so this is a reservation, not a limit."""
    gpus: float = 0
    """GPUs that Ray reserves."""
    memory_gib: float | None = None
    """Memory that Ray reserves on the actor's node, GiB. None: none. It is no limit either."""

    def reservation(self) -> dict[str, float]:
        """What Ray reserves, by its names: CPU (cores), GPU, memory (bytes)."""
        return {"CPU": self.cpus, "GPU": self.gpus, "memory": int((self.memory_gib or 0) * 2**30)}


class EngineLost(Transient):
    """The actor died or did not answer in time; the next call builds a new one."""


def resolve(path: str) -> Callable[..., Any]:
    """`package.module:name` -> the object it names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: by default it returns blocks above 32 MiB to the system at once, and every large
    temporary tensor costs a page fault for each of its 4 KiB pages again. A no-op where there is no glibc."""
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


def give_back_memory() -> None:
    """Return what loading has freed to the system; `keep_freed_memory` would keep it for ever."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Resident:
    """The actor's body. Ray runs one call at a time, so an engine never sees two."""

    def __init__(self, spec: EngineSpec):
        os.environ.update(spec.environment)
        keep_freed_memory()
        self.spec = spec
        self.engine: Any = None

    def load(self) -> int:
        """Build the engine (once); returns the process id, which the recovery tests kill."""
        if self.engine is None:
            self.engine = resolve(self.spec.factory)(**self.spec.settings)
            give_back_memory()
        return os.getpid()

    def call(self, function: str, version: ArtifactRef | None, arguments: dict[str, Any]) -> Any:
        """Bring the engine to `version` (None: as it is), then return `function(engine, **arguments)`."""
        self.load()
        if version is not None:
            resolve(self.spec.follow)(self.engine, version)
        return resolve(function)(self.engine, **arguments)


@contextlib.contextmanager
def _sigterm_left_alone() -> Iterator[None]:
    """Inside, Ray does not set its own handler of SIGTERM: by Prefect's, a flow run that is cancelled is told from one that
    crashed, which is started again. Ray's only ends the process, as `stop_ray` and its atexit hook do."""
    from ray._private import utils

    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


@_sigterm_left_alone()
def start_ray(address: str | None = None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS, else start Ray in this process tree; a no-op when it runs."""
    import ray
    from ray._common.utils import get_system_memory

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's own 15 would leave the engines what the machine's other work does not want.
    os.environ.setdefault("RAY_worker_niceness", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
    if address:
        ray.init(address, **quiet)
        return
    # Big values go through the store, so the object store can be small; the dashboard costs 200 MB.
    quiet |= {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 128 * 1024**2}
    # What engines may reserve is the machine's (or the container's), not what happens to be free just now.
    quiet |= {"_memory": get_system_memory()}
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init("local", **quiet)  # never the remains of a killed run's Ray
            return
        except Exception as error:  # Ray gives a slow machine 30 s and then raises a bare Exception
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == START_ATTEMPTS - 1:
                raise


def stop_ray() -> None:
    """Leave the cluster; actors of this process, and a Ray that it started, end with it."""
    import ray

    _handles.clear()
    ray.shutdown()


class Engine:
    """A handle on a resident engine. Creating it costs nothing; the actor starts with `load` or the first call."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec

    def _actor(self) -> Any:
        import ray

        if self.spec.name in _handles:
            return _handles[self.spec.name]
        start_ray()
        options = {"name": self.spec.name, "namespace": NAMESPACE, "get_if_exists": True, "max_restarts": 0}
        reserved = self.spec.reservation()
        actor = ray.remote(Resident).options(
            num_cpus=reserved["CPU"], num_gpus=reserved["GPU"], memory=reserved["memory"], max_concurrency=1, **options
        )
        _handles[self.spec.name] = actor.remote(self.spec)
        return _handles[self.spec.name]

    def start(self) -> Any:
        """Begin to load the engine and return at once: engines load side by side."""
        return self._actor().load.remote()

    def load(self, timeout_s: float | None = None) -> int:
        """Wait until the engine is loaded; its process id."""
        return self._get(lambda actor: actor.load.remote(), timeout_s)

    def call(
        self, function: str, *, version: ArtifactRef | None = None, timeout_s: float | None = None, **arguments: Any
    ) -> Any:
        """`function(engine, **arguments)` in the actor, the engine brought to `version` first.

        Raises EngineLost when the actor died or did not answer within `timeout_s` (it is killed then, so that a
        retry does not wait behind it); what the function raised is raised as it is. After anything but BadInput,
        Lasting and Transient the actor is stopped.
        """
        return self._get(lambda actor: actor.call.remote(function, version, arguments), timeout_s)

    def _get(self, submit: Callable[[Any], Any], timeout_s: float | None) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

        actor = self._actor()
        try:
            return ray.get(submit(actor), timeout=timeout_s)
        except GetTimeoutError as error:
            self.stop()
            raise EngineLost(
                f"engine {self.spec.name} did not answer within {timeout_s:.0f} s; it was stopped"
            ) from error
        except OutOfMemoryError as error:  # Ray's memory monitor ended the process, before the kernel did
            self.stop()
            raise OutOfMemory(f"engine {self.spec.name}: {_first_line(error)}") from error
        except RayActorError as error:
            self.stop()
            raise EngineLost(f"engine {self.spec.name} died: {_first_line(error)}") from error
        except RayTaskError as error:
            # Keep the kind of the fault: Ray wraps it, and retries are decided by its type.
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, BadInput | Lasting | Transient):
                raise cause from None
            self.stop()  # nobody knows what the fault has left in the engine: the next call builds a new one
            if is_out_of_memory(cause):
                raise OutOfMemory(f"engine {self.spec.name}: {_first_line(cause)}") from error
            raise

    def stop(self) -> None:
        """End the actor's process now; a call after this builds a new one."""
        import ray

        _handles.pop(self.spec.name, None)
        if not ray.is_initialized():  # nothing was started; to ask Ray would start it
            return
        try:
            ray.kill(ray.get_actor(self.spec.name, namespace=NAMESPACE), no_restart=True)
        except ValueError:
            pass


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch (a GPU's allocator or the CPU's) or Python could not get memory."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    return (
        bool(names & {"OutOfMemoryError", "MemoryError"})
        or "can't allocate memory" in text
        or "not enough memory" in text
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
