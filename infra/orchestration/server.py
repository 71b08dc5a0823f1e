"""Prefect on this machine: `python -m infra.orchestration.server` (`make server`) runs the server, makes the work pools and the
deployments, and runs a worker. Everything binds to loopback and ends with this process.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from infra.errors import BadInput, Transient
from infra.storage.s3_server import end_with_parent
from infra.storage.urls import prefect_database

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
REPOSITORY = Path(__file__).parents[2]


class LocalPrefect:
    """A context manager: inside it, server and worker run, and the deployments of prefect.yaml are there.

    `home` keeps the server's database (SQLite) and the logs. One machine, a few dozen flow runs at a time: beyond that,
    run the server with PostgreSQL (PREFECT_SERVER_DATABASE_CONNECTION_URL).
    """

    def __init__(self, home: str | Path, port: int = 4200, environment: dict[str, str] | None = None):
        self.home, self.port = Path(home).absolute(), port
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._extra = environment or {}

    @property
    def api_url(self) -> str:
        """What PREFECT_API_URL must be to use the server."""
        return f"{self.ui_url}/api"

    @property
    def ui_url(self) -> str:
        """The UI's address."""
        return f"http://{HOST}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the server, the worker and whoever talks to them."""
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return {
            **os.environ,
            "PYTHONPATH": path,
            "PREFECT_HOME": str(self.home),
            **prefect_database(self.home),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_SERVER_API_HOST": HOST,
            "PREFECT_SERVER_UI_ENABLED": "true",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
            # SQLite takes one writer at a time. When many flow runs begin together, each waits for its turn longer than
            # Prefect's 10 s and 5 tries, after which it would be Crashed.
            "PREFECT_SERVER_DATABASE_TIMEOUT": "40",
            "PREFECT_CLIENT_MAX_RETRIES": "10",
            **self._extra,
        }

    def start(self) -> "LocalPrefect":
        """Return when the worker is about to poll. Raises BadInput for a taken port, Transient for a failed start."""
        with socket.socket() as probe:
            if probe.connect_ex((HOST, self.port)) == 0:
                raise BadInput(f"port {self.port} of {HOST} is taken: choose another, or end what runs there")
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            self._spawn("server", "server", "start", "--host", HOST, "--port", str(self.port))
            self._wait_for_server()
            self._run([sys.executable, "-m", "infra.orchestration.workspace"])
            self.deploy()
            self.start_worker()
        except BaseException:
            self.stop()
            raise
        return self

    def deploy(self, file: str | Path = "prefect.yaml") -> None:
        """`prefect deploy --all`: register every deployment of the file."""
        self._run([sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)])

    def start_worker(self) -> None:
        """Run a worker of the pool `local`, all queues."""
        self._spawn("worker", "worker", "start", "--pool", "local", "--name", "local", "--type", "process")

    def stop(self) -> None:
        """End worker and server, the flow runs of the worker with it."""
        for name in ("worker", "server"):
            if name in self.processes:
                end(self.processes.pop(name))

    def __enter__(self) -> "LocalPrefect":
        return self if self.processes else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "prefect", *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                cwd=REPOSITORY,
                start_new_session=True,
                preexec_fn=_child,
            )

    def _run(self, command: list[str]) -> None:
        result = subprocess.run(
            command, env=self.environment, cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if result.returncode:
            raise Transient(f"{' '.join(command[1:])} failed:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")

    def _wait_for_server(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.processes["server"].poll() is None:
            try:
                urllib.request.urlopen(f"{self.api_url}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.2)
        tail = (self.home / "server.log").read_text(errors="replace")[-2000:]
        raise Transient(f"the Prefect server did not come up at {self.ui_url}; the end of its log:\n{tail}")


def end(process: "subprocess.Popen[bytes]", patience_s: float = 30) -> None:
    """SIGTERM, then SIGKILL to the process's session."""
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 10)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue


def _child() -> None:
    """A background shell lets its children ignore SIGINT, and a Prefect worker that does also ignores SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


def main() -> None:
    """Run until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", default=os.environ.get("PREFECT_HOME", "outputs/prefect"), help="database and logs")
    parser.add_argument("--port", type=int, default=4200, help="port on loopback (default 4200)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = LocalPrefect(arguments.home, arguments.port)
    print(f"starting the Prefect server at {server.ui_url} ...", flush=True)
    try:
        with server:
            print(f"server     {server.ui_url}\nworker     pool local, log {server.home}/worker.log")
            print(f"in other shells:\nexport PREFECT_API_URL={server.api_url}")
            print("prefect deployment run train/smollm2-cpu\n# Ctrl-C ends server and worker", flush=True)
            while server.processes["server"].poll() is None:
                threading.Event().wait(1)
                if server.processes["worker"].poll() is not None:
                    print(f"the worker has ended (see {server.home}/worker.log); a new one is started", flush=True)
                    server.start_worker()
            sys.exit(f"error: the server has ended; see {server.home}/server.log")
    except KeyboardInterrupt:
        pass
    except (BadInput, Transient) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
