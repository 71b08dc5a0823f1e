"""Talking to a process that runs an environment's code: one JSON line a request, one a reply. Both ends."""

import json
import os
import selectors
import subprocess
import time
from typing import Any, TextIO


def ask(process: "subprocess.Popen[bytes]", request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The reply to a request. Raises as `receive`, and BrokenPipeError when the process has ended."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return receive(process, timeout_s)


def receive(process: "subprocess.Popen[bytes]", timeout_s: float) -> dict[str, Any]:
    """The next reply. Raises TimeoutError, or EOFError when the process ends without one."""
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            # os.read, because a buffered readline would wait for a whole line without a limit.
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            line += chunk
    return json.loads(line)


def claim_pipes() -> tuple[TextIO, TextIO]:
    """(requests, replies): the caller's pipes. What a verifier prints goes to stderr, and what it reads is empty."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def send(replies: TextIO, reply: dict[str, Any]) -> None:
    """Answer the caller."""
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def describe(error: Exception) -> str:
    """What was raised, and where."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f" ({os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})" if frame else ""
    return f"{type(error).__name__}: {error}"[:500] + place


def end_with(parent: int) -> None:
    """Ends this process when its parent is gone; for a thread of its own."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
