"""A proxy before a real S3 server that does what networks and stores do: refuse, reset, cut short, lose replies, lag."""

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

FAULTS = ("slow down", "internal error", "reset", "lost reply", "cut short", "slow", "stale list")
AIMED = {
    "slow down": (503, "SlowDown"),
    "internal error": (500, "InternalError"),
    "refused": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
    "no bucket": (404, "NoSuchBucket"),
}
"""Replies in place of the server's: status and code. Others that are only aimed: "short range", "wrong range"."""
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
_HOPS = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class FaultyS3:
    """A context manager; inside it `endpoint` is the server's, with faults at a share `rate` of all requests."""

    def __init__(self, upstream: str, rate: float, seed: int = 0, faults: tuple[str, ...] = FAULTS):
        self.host, self.port = upstream.removeprefix("http://").split(":")
        self.rate, self.faults = rate, faults
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.done: Counter[str] = Counter()
        """Faults that were injected, by name."""
        self.requests: Counter[str] = Counter()
        """Requests, by method."""
        self.written = 0
        """Bytes of the PUTs that the server took."""
        self.after_write: Callable[[], object] | None = None
        """Called when it has taken one, before the reply."""
        self.aim: Callable[[str, str], str | None] = lambda method, path: None
        """Beside the faults by chance: the fault of a request by its method and path, if any."""
        self.lists: dict[str, bytes] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FaultyS3":
        proxy = self

        class Handler(_Handler):
            faulty = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wrote(self, size: int) -> None:
        with self.lock:
            self.written += size
            if self.after_write is not None:
                self.after_write()

    def choose(self, method: str, path: str) -> str | None:
        """The fault of a request, if any."""
        with self.lock:
            self.requests[method] += 1
            if fault := self.aim(method, path):
                self.done[fault] += 1
                return fault
            possible = [fault for fault in self.faults if _fits(fault, method, path)]
            if "list-type" in path and "stale list" in possible and self.random.random() < 3 * self.rate:
                possible = ["stale list"]  # there are few lists
            elif not possible or self.random.random() >= self.rate:
                return None
            fault = self.random.choice(possible)
            self.done[fault] += 1
            return fault


def _fits(fault: str, method: str, path: str) -> bool:
    if fault == "cut short":
        return method == "GET" and "list-type" not in path
    if fault == "stale list":
        return method == "GET" and "list-type" in path
    return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faulty: FaultyS3

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        fault = self.faulty.choose(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault in AIMED:
            status, code = AIMED[fault]
            return self._answer(status, {"Content-Type": "application/xml"}, _ERROR.format(code=code).encode())
        if fault == "reset":
            return self._hang_up()
        if fault == "slow":
            time.sleep(0.3)
        connection = http.client.HTTPConnection(self.faulty.host, int(self.faulty.port), timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():  # the signature covers them, Host included
            connection.putheader(name, value)
        connection.endheaders(body or None)
        reply = connection.getresponse()
        data = reply.read()
        headers = {name: value for name, value in reply.getheaders() if name.lower() not in _HOPS}
        if self.command == "PUT" and reply.status == 200:
            self.faulty.wrote(len(body))
        if "list-type" in self.path:
            if fault == "stale list":
                data = self.faulty.lists.get(self.path, data)
            else:
                self.faulty.lists[self.path] = data
        if fault == "lost reply":
            return self._hang_up()
        if fault == "short range":
            data = data[: len(data) // 2]
        if fault == "wrong range":
            data, headers["Content-Range"] = data[::-1], f"bytes 0-{len(data) - 1}/{2 * len(data)}"
        length = int(reply.getheader("Content-Length") or 0) if self.command == "HEAD" else len(data)
        self._answer(reply.status, headers, data[: len(data) // 2] if fault == "cut short" else data, length)
        if fault == "cut short":
            self._hang_up()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _answer(self, status: int, headers: dict[str, str], data: bytes, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        with suppress(ConnectionError):  # a client that gave up, after a slow reply say
            if self.command != "HEAD":
                self.wfile.write(data)

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()
