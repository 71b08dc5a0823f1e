"""Servers that a killed flow has left behind."""

import os

import psutil

SERVER = "prefect.server.api.server"


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
