"""A process of an interactive environment as its caller has it: requests by number, several under way at once."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from environments.pipes import receive
from infra.errors import BadInput, Transient

START_TIMEOUT_S = 120.0
"""An environment may import a lot before it is ready."""


class EpisodeProcess:
    """Runs `environments.episodes.worker` of one environment."""

    def __init__(self, reference: str, timeout_s: float, python: str | None, at_once: int, memory_gib: float) -> None:
        """As `EpisodePool`. Raises BadInput for an environment or an interpreter that is none, Transient for a process that
        does not start."""
        root = str(Path(__file__).parents[2])
        # Another interpreter has packages of its own; ours would get in their way.
        path = root if python else os.pathsep.join(entry for entry in sys.path if entry)
        command = [python or sys.executable, "-m", "environments.episodes.worker", reference]
        try:
            self._process = subprocess.Popen(
                [*command, str(timeout_s), str(at_once), str(memory_gib)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a group of its own: what an environment starts ends with it
                env=os.environ | {"PYTHONPATH": path},
            )
        except OSError as error:
            raise BadInput(f"episodes.python {python!r} cannot be started: {error.strerror}") from None
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._asked, self._ended = 0, False
        try:
            reply = receive(self._process, START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            self.close()
            raise Transient(f"environment {reference!r}: its process did not start ({error or 'it ended'})") from None
        if "ready" not in reply:
            self.close()
            raise BadInput(reply.get("bad_input") or f"environment {reference!r} does not load: {reply.get('raised')}")
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request. Raises TimeoutError, and EOFError when the process ends without one."""
        asked: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended:
                raise EOFError
            self._asked += 1
            self._waiting[self._asked] = asked
            line = json.dumps({"number": self._asked, **request}).encode() + b"\n"
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):  # closed meanwhile
                raise EOFError from None
        return asked.result(self._timeout_s)

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process, after `grace_s` by a kill, and what it has started; returns its exit code."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return self._process.returncode

    def _read(self) -> None:
        """Gives every reply to who asked; at the end of them, all that wait get EOFError."""
        assert self._process.stdout is not None
        with self._process.stdout as replies:
            for line in replies:
                reply = json.loads(line)
                with self._lock:
                    asked = self._waiting.pop(reply.pop("number"), None)
                if asked is not None:
                    asked.set_result(reply)
        with self._lock:
            self._ended = True
            waiting, self._waiting = list(self._waiting.values()), {}
        for asked in waiting:
            asked.set_exception(EOFError())
