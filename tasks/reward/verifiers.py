"""Processes that compute rewards, each call under a time limit that holds whatever the verifier does."""

import atexit
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

from environments import located
from environments.pipes import ask, receive
from infra.errors import BadInput, Transient

START_TIMEOUT_S = 120.0
"""An environment may import a lot (sympy, a tokenizer) before it is ready."""


@dataclass(frozen=True)
class Request:
    """One response to score."""

    response: str
    answer: Any
    metadata: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    """Further keywords of the reward, of those that it names (`Verifier.keywords`)."""


@dataclass(frozen=True)
class Verdict:
    """The parts of a reward, all finite; or why there is none."""

    parts: dict[str, float] = field(default_factory=dict)
    fault: str | None = None
    """One of "raised", "timeout", "not_finite" or "crashed"; None when `parts` holds."""
    detail: str = ""


class Verifier:
    """One worker process with an environment; it is started again when it was lost."""

    def __init__(self, reference: str, timeout_s: float) -> None:
        self._reference = reference
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._keywords: dict[str, bool] = {}

    def keywords(self) -> dict[str, bool]:
        """What the reward names besides response, answer and metadata -> whether it cannot do without."""
        if self._process is None:
            self._start()
        return self._keywords

    def score(self, request: Request) -> Verdict:
        """Raises BadInput when the environment cannot be loaded; every other fault is a verdict."""
        process = self._process or self._start()
        try:
            asked = {"response": request.response, "answer": request.answer, "metadata": request.metadata}
            reply = ask(process, asked | request.more, self._timeout_s)
        except TimeoutError:
            self.close()
            return Verdict(fault="timeout", detail=f"no reward within {self._timeout_s:g} s")
        except (EOFError, BrokenPipeError):
            code = self.close(grace_s=1.0)
            return Verdict(fault="crashed", detail=f"the reward's process ended (exit code {code})")
        if "raised" in reply:
            return Verdict(fault="raised", detail=reply["raised"])
        parts: dict[str, float] = reply["parts"]
        if not all(map(math.isfinite, parts.values())):
            return Verdict(fault="not_finite", detail=f"the reward is {parts}")
        return Verdict(parts)

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process, if there is one, by a kill after `grace_s`; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        return process.returncode

    def _start(self) -> "subprocess.Popen[bytes]":
        path, reference = os.pathsep.join(entry for entry in sys.path if entry), located(self._reference)
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks.reward.worker", reference, str(self._timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        try:
            reply = receive(process, START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            self.close()
            raise Transient(f"environment {reference!r}: its process did not start ({error or 'it ended'})") from None
        if "ready" not in reply:
            self.close()
            reason = reply.get("bad_input") or f"environment {reference!r} does not load: {reply.get('raised')}"
            raise BadInput(reason)
        self._keywords = reply["ready"]
        return process


class VerifierPool:
    """Some verifiers of one environment, resident between steps."""

    def __init__(self, reference: str, timeout_s: float, workers: int) -> None:
        self._verifiers = [Verifier(reference, timeout_s) for _ in range(workers)]
        self._busy = threading.Lock()

    def score(self, requests: Sequence[Request]) -> list[Verdict]:
        """Verdicts in the requests' order, after at most len(requests) / workers * timeout_s; milliseconds as a rule."""
        free: SimpleQueue[Verifier] = SimpleQueue()
        for verifier in self._verifiers:
            free.put(verifier)

        def run(request: Request) -> Verdict:
            verifier = free.get()
            try:
                return verifier.score(request)
            finally:
                free.put(verifier)

        with self._busy, ThreadPoolExecutor(min(len(self._verifiers), max(len(requests), 1))) as threads:
            return list(threads.map(run, requests))

    def keywords(self) -> dict[str, bool]:
        """As `Verifier.keywords`."""
        with self._busy:
            return self._verifiers[0].keywords()

    def close(self) -> None:
        """End the processes; the next call starts them again."""
        for verifier in self._verifiers:
            verifier.close()


@lru_cache
def resident_pool(reference: str, timeout_s: float, workers: int) -> VerifierPool:
    """This process's pool for an environment; its workers end with this process."""
    pool = VerifierPool(reference, timeout_s, workers)
    atexit.register(pool.close)
    return pool
