"""Prefect's temporary server, which a flow without PREFECT_API_URL has for itself, and those that killed flows left."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from infra.errors import Lasting
from infra.orchestration.durations import Durations
from infra.orchestration.progress import Progress
from infra.storage.disk import full_places

SERVER = "prefect.server.api.server"
STARTS = 3
"""Prefect starts its server again, without end, where it finds the port taken or cannot open its database."""


class NotStarted(Lasting):
    """The server did not come up."""


def start(durations: Durations | None = None) -> None:
    """Start it, and say so where that takes long. Raises NotStarted."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings

    progress = Progress(durations)
    server = SubprocessASGIServer()
    log = Path(get_current_settings().home, "temporary-server.log")
    server._run_uvicorn_command = _at_most(STARTS, _told_to(log, server._run_uvicorn_command))
    try:
        with progress.waiting("starting Prefect's server for this run"):
            server.start()
    except RuntimeError as error:
        if full := full_places({"PREFECT_HOME": get_current_settings().home}):
            raise NotStarted(
                f"Prefect's temporary server did not start: {full[0]}; make room, and start again"
            ) from None
        limit = get_current_settings().server.ephemeral.startup_timeout_seconds
        raise NotStarted(
            f"Prefect's temporary server did not start within {limit} s ({str(error).splitlines()[0]}): start again, give it longer "
            "by PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, or name a server that runs by PREFECT_API_URL; "
            f"its log is {log}"
        ) from None
    finally:
        progress.close()


def _told_to(log: Path, start: Callable[[], Any]) -> Callable[[], Any]:
    """`start`, with the new process's standard error in a file: a traceback for every request that fails hides what the run
    says of the fault."""

    def redirected() -> Any:
        ours = os.dup(2)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as file:
                os.dup2(file.fileno(), 2)
            return start()
        finally:
            os.dup2(ours, 2)
            os.close(ours)

    return redirected


def _at_most(times: int, start: Callable[[], Any]) -> Callable[[], Any]:
    left = times

    def counted() -> Any:
        nonlocal left
        if not left:
            raise RuntimeError(f"it ended {times} times while it started")
        left -= 1
        return start()

    return counted


def end_orphaned_servers(prefect_home: str) -> int:
    """End Prefect's temporary servers on this database whose flow is gone; returns how many there were.

    Prefect starts such a server for a flow without an API. After a kill -9 of the flow it lives on and holds SQLite's
    locks, and the next flow's server cannot start.
    """
    orphans = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        try:
            command = " ".join(process.info["cmdline"] or [])
            if SERVER not in command or process.environ().get("PREFECT_HOME") != prefect_home:
                continue
            if process.info["ppid"] == 1 and process.uids().real == os.getuid():
                process.kill()
                orphans.append(process)
        except psutil.Error:
            continue
    psutil.wait_procs(orphans, timeout=10)
    return len(orphans)
