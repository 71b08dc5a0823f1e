"""Resident engines: Ray actors that hold an engine for a whole run, found again or replaced when they are lost.

A task names a function and the policy version it needs; the actor brings its engine to that version and runs the
function on it. So a fresh engine, a restarted one and a warm one take the same path, and a flow holds no weights.

An engine of several processes (a trainer with tensor or pipeline parallelism) is one actor a rank. Every call runs on
all ranks at once, as torch.distributed programs do; rank 0's answer counts, and one lost rank ends them all.
"""

import contextlib
import ctypes
import importlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from infra.artifacts import ArtifactRef
from infra.config import Config
from infra.errors import BadInput, Corrupted, OutOfMemory, Transient

NAMESPACE = "policyflow"
START_ATTEMPTS = 3
# When a rank fails, the others fail alike within this time, or wait for it in a collective and are ended.
GRACE_S = 10.0

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
    """GPUs that Ray reserves for each process."""
    processes: int = 1
    """Ranks, each an actor of its own; they find each other by torch.distributed's environment variables."""

    def actor_name(self, rank: int) -> str:
        """Ray's name of the actor of a rank."""
        return f"{self.name}#{rank}" if rank else self.name


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


class Resident:
    """The actor's body. Ray runs one call at a time, so an engine never sees two."""

    def __init__(self, spec: EngineSpec, rank: int):
        os.environ.update(spec.environment)
        keep_freed_memory()
        self.spec, self.rank = spec, rank
        self.engine: Any = None

    def address(self) -> tuple[str, int]:
        """Where the ranks meet: this node's address and a port that is free."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def join(self, address: tuple[str, int]) -> None:
        """Learn of the other ranks; the engine's libraries meet them while it loads."""
        host, port = address
        os.environ.update(
            MASTER_ADDR=host, MASTER_PORT=str(port), RANK=str(self.rank), WORLD_SIZE=str(self.spec.processes)
        )

    def load(self) -> int:
        """Build the engine (once); returns the process id, which the recovery tests kill."""
        if self.engine is None:
            self.engine = resolve(self.spec.factory)(**self.spec.settings)
        return os.getpid()

    def call(self, function: str, version: ArtifactRef | None, arguments: dict[str, Any]) -> Any:
        """Bring the engine to `version` (None: as it is), then return `function(engine, **arguments)`."""
        self.load()
        if version is not None:
            resolve(self.spec.follow)(self.engine, version)
        return resolve(function)(self.engine, **arguments)


def start_ray(address: str | None = None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS, else start Ray in this process tree; a no-op when it runs."""
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
    if address:
        ray.init(address, **quiet)
        return
    # Big values go through the store, so the object store can be small; the dashboard costs 200 MB.
    quiet |= {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 128 * 1024**2}
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

    def _actors(self) -> list[Any]:
        """Handles on every rank, started if they are not there."""
        import ray

        ranks = range(self.spec.processes)
        names = [self.spec.actor_name(rank) for rank in ranks]
        if all(name in _handles for name in names):
            return [_handles[name] for name in names]
        for rank, name in zip(ranks, names, strict=True):
            options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "max_restarts": 0}
            actor = ray.remote(Resident).options(
                num_cpus=self.spec.cpus, num_gpus=self.spec.gpus, max_concurrency=1, **options
            )
            _handles[name] = actor.remote(self.spec, rank)
        actors = [_handles[name] for name in names]
        if self.spec.processes > 1:
            address = ray.get(actors[0].address.remote())
            ray.get([actor.join.remote(address) for actor in actors])
        return actors

    def start(self) -> Any:
        """Begin to load the engine and return at once: engines load side by side."""
        return [actor.load.remote() for actor in self._actors()]

    def load(self, timeout_s: float | None = None) -> int:
        """Wait until the engine is loaded; its process id (rank 0's)."""
        return self._get(lambda actor: actor.load.remote(), timeout_s)

    def call(
        self, function: str, *, version: ArtifactRef | None = None, timeout_s: float | None = None, **arguments: Any
    ) -> Any:
        """`function(engine, **arguments)` in the actor, the engine brought to `version` first.

        Raises EngineLost when the actor died or did not answer within `timeout_s` (it is killed then, so that a
        retry does not wait behind it); what the function raised is raised as it is.
        """
        return self._get(lambda actor: actor.call.remote(function, version, arguments), timeout_s)

    def _get(self, submit: Callable[[Any], Any], timeout_s: float | None) -> Any:
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

        try:
            calls = [submit(actor) for actor in self._actors()]
            self._wait(calls, timeout_s)
            return ray.get(calls)[0]
        except OutOfMemoryError as error:  # Ray's memory monitor ended the process, before the kernel did
            self.stop()
            raise OutOfMemory(f"engine {self.spec.name}: {_first_line(error)}") from error
        except RayActorError as error:
            self.stop()
            raise EngineLost(f"engine {self.spec.name} died: {_first_line(error)}") from error
        except RayTaskError as error:
            # Keep the kind of the fault: Ray wraps it, and retries are decided by its type.
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, BadInput | Corrupted | Transient):
                raise cause from None
            if is_out_of_memory(cause):
                raise OutOfMemory(f"engine {self.spec.name}: {_first_line(cause)}") from error
            raise

    def _wait(self, calls: list[Any], timeout_s: float | None) -> None:
        """Until all ranks have answered; the first fault is raised once the others have failed too or were ended."""
        import ray

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pending = list(calls)
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=left)
            if not done:
                self.stop()
                raise EngineLost(f"engine {self.spec.name} did not answer within {timeout_s:.0f} s; it was stopped")
            try:
                ray.get(done)
            except Exception:
                if pending and len(ray.wait(pending, num_returns=len(pending), timeout=GRACE_S)[0]) < len(pending):
                    self.stop()
                raise

    def stop(self) -> None:
        """End the engine's processes now; a call after this builds new ones."""
        import ray

        for name in map(self.spec.actor_name, range(self.spec.processes)):
            _handles.pop(name, None)
            try:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
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
