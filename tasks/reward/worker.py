"""The process that runs an environment's reward: one JSON line in, one out, until its input ends.

A process, not a thread: a verifier caught in a regular expression holds the interpreter's lock, and only a kill ends it.
A program, not a fork: nothing of the caller's threads, weights or main module comes along.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

from environments import Environment, load_reference
from infra.errors import BadInput


def main(reference: str, timeout_s: float) -> None:
    """Answers {"ready": true} or {"bad_input" | "raised": why}, then each request {response, answer, metadata}."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    requests, replies = _claim_pipes()
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        environment = load_reference(reference)
    except BadInput as error:
        return _send(replies, {"bad_input": str(error)})
    except Exception as error:
        return _send(replies, {"raised": _describe(error)})
    _send(replies, {"ready": True})
    for line in requests:
        # An orphan in a loop of C code would never see that its parent is gone: its own processor time ends it.
        # (Not SIGALRM, which verifiers use for timeouts of their own.)
        signal.setitimer(signal.ITIMER_PROF, 10 * timeout_s + 10)
        _send(replies, _reply(environment, json.loads(line)))


def _reply(environment: Environment, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"parts": as_parts(environment.reward(**request))}
    except Exception as error:
        return {"raised": _describe(error)}


def as_parts(reward: Any) -> dict[str, float]:
    """A reward as named parts; a plain number is the part "reward". TypeError for what is no number."""
    parts = reward if isinstance(reward, Mapping) else {"reward": reward}
    if not parts:
        raise TypeError("the reward returned no part")
    for name, value in parts.items():
        if not isinstance(name, str) or isinstance(value, str) or not hasattr(value, "__float__"):
            raise TypeError(f"a reward is a number or a mapping of names to numbers, not {reward!r:.200}")
    return {name: float(value) for name, value in parts.items()}


def _claim_pipes() -> tuple[TextIO, TextIO]:
    """(requests, replies): the caller's pipes. What a verifier prints goes to stderr, and what it reads is empty."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _describe(error: Exception) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f" ({os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})" if frame else ""
    return f"{type(error).__name__}: {error}"[:500] + place


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
