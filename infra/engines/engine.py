"""Resident engines: Ray actors that hold an engine for a whole run, found again or replaced when they are lost.

A task names a function and the policy version it needs; the actor brings its engine to that version and runs the
function on it. So a fresh engine, a restarted one and a warm one take the same path, and a flow holds no weights.
"""

from collections.abc import Callable
from typing import Any, Concatenate

import psutil

from infra.engines.cluster import HANDLES, NAMESPACE, PROCESSES, start_ray
from infra.engines.resident import Resident
from infra.engines.spec import EngineSpec
from infra.errors import BadInput, Lasting, OutOfMemory, Transient
from infra.storage.artifacts import ArtifactRef

STOP_S = 15.0
"""How long a process that was killed is waited for."""


class EngineLost(Transient):
    """The actor died or did not answer in time; the next call builds a new one."""


class Engine[E]:
    """A handle on a resident engine. Creating it costs nothing; the actor starts with `load` or the first call."""

    def __init__(self, spec: EngineSpec[E], version: ArtifactRef | None = None, timeout_s: float | None = None):
        """`version`: what a call needs the engine to be at, None: as it is. `timeout_s`: of a call, None: no limit."""
        self.spec, self.version, self.timeout_s = spec, version, timeout_s

    def _actor(self) -> Any:
        import ray

        name = self.spec.actor
        if name in HANDLES:
            return HANDLES[name]
        start_ray()
        options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "max_restarts": 0}
        reserved = self.spec.reservation()
        actor = ray.remote(Resident).options(
            num_cpus=reserved["CPU"], num_gpus=reserved["GPU"], memory=reserved["memory"], max_concurrency=1, **options
        )
        HANDLES[name] = actor.remote(self.spec)
        return HANDLES[name]

    def start(self) -> Any:
        """Begin to load the engine and return at once: engines load side by side."""
        return self._actor().load.remote()

    def load(self) -> int:
        """Wait until the engine is loaded; its process id."""
        pid = self._get(lambda actor: actor.load.remote())
        for process in psutil.Process().children(recursive=True):  # on a cluster it may be another machine's
            if process.pid == pid:
                PROCESSES[self.spec.actor] = process
        return pid

    def call[**P, R](self, function: Callable[Concatenate[E, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`function(engine, *args, **kwargs)` in the actor, the engine brought to the version first.

        Raises EngineLost when the actor died or did not answer within `timeout_s` (it is killed then, so that a
        retry does not wait behind it); what the function raised is raised as it is. After anything but BadInput,
        Lasting and Transient the actor is stopped.
        """
        return self._get(lambda actor: actor.call.remote(function, self.version, args, kwargs))

    def _get(self, submit: Callable[[Any], Any]) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

        actor = self._actor()
        try:
            return ray.get(submit(actor), timeout=self.timeout_s)
        except GetTimeoutError as error:
            self.stop()
            raise EngineLost(
                f"engine {self.spec.name} did not answer within {self.timeout_s:.0f} s; it was stopped"
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
        """End the actor's process now; a call after this builds a new one. Returns when its memory is free, where that is
        this machine's: gigabytes take a while, and the next engine is loaded in their place."""
        import ray

        HANDLES.pop(self.spec.actor, None)
        process = PROCESSES.pop(self.spec.actor, None)
        if not ray.is_initialized():  # nothing was started; to ask Ray would start it
            return
        try:
            ray.kill(ray.get_actor(self.spec.actor, namespace=NAMESPACE), no_restart=True)
        except ValueError:
            pass
        if process is not None:
            psutil.wait_procs([process], timeout=STOP_S)


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
