"""Prefect's temporary server, which a flow without PREFECT_API_URL has for itself, and those that killed flows left."""

import os

import psutil

from infra.errors import Lasting
from infra.progress import Progress

SERVER = "prefect.server.api.server"


class NotStarted(Lasting):
    """The server did not come up."""


def start() -> None:
    """Start it, and say so where that takes long. Raises NotStarted."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings

    progress = Progress()
    try:
        with progress.waiting("starting Prefect's server for this run"):
            SubprocessASGIServer().start()
    except RuntimeError as error:
        limit = get_current_settings().server.ephemeral.startup_timeout_seconds
        raise NotStarted(
            f"Prefect's temporary server did not start within {limit} s ({str(error).splitlines()[0]}): start again, give it longer "
            "by PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, or name a server that runs by PREFECT_API_URL"
        ) from None
    finally:
        progress.close()


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
