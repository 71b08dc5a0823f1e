"""Ray: the cluster at RAY_ADDRESS, or one of this process's own."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import psutil

NAMESPACE = "policyflow"
START_ATTEMPTS = 3

HANDLES: dict[str, Any] = {}
"""Actors by name. Ray ends an actor when the last handle on it is gone: this process keeps one on each of its engines."""

PROCESSES: dict[str, psutil.Process] = {}
"""Of engines that this process loaded on its own machine, by actor: who stops one wants its memory back."""


@contextlib.contextmanager
def _sigterm_left_alone() -> Iterator[None]:
    """Inside, Ray does not set its own handler of SIGTERM: by Prefect's, a flow run that is cancelled is told from one that
    crashed, which is started again. Ray's only ends the process, as `stop_ray` and its atexit hook do.

    Patches ray 2.60.0, _private/utils.py. Seen: a flow run that is cancelled ends as Crashed, and an automation resumes it
    (tests/integration/test_deployments.py). Can go: when ray.init takes a setting for it.
    """
    from ray._private import utils

    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


@contextlib.contextmanager
def _without_monitors() -> Iterator[None]:
    """Inside, a Ray that is started has neither an autoscaler, which one machine needs not, nor a process that reads the
    workers' logs for the driver, which `log_to_driver` has asked not to be told: 85 MB each.

    Patches ray 2.60.0, _private/parameter.py. Seen: two more processes. Can go: when ray.init has words for it.
    """
    from ray._private import parameter

    original = parameter.RayParams
    parameter.RayParams = functools.partial(original, no_monitor=True, include_log_monitor=False)  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        parameter.RayParams = original


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
            with _without_monitors():
                ray.init("local", **quiet)  # never the remains of a killed run's Ray
            return
        except Exception as error:  # Ray gives a slow machine 30 s and then raises a bare Exception
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == START_ATTEMPTS - 1:
                raise


def stop_ray() -> None:
    """Leave the cluster; actors of this process, and a Ray that it started, end with it."""
    import ray

    HANDLES.clear()
    PROCESSES.clear()
    ray.shutdown()
