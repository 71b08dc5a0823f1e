"""The process that holds an environment's episodes: start, step and close, one JSON line each, until its input ends.

It imports the standard library, `environments` and `infra.errors` alone, so that another interpreter can run it.
"""

import math
import os
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from json import loads
from typing import Any

from environments.environment import Episode, Interactive, Problem, Reply, ToolCall, Turn
from environments.pipes import claim_pipes, describe, end_with, send
from environments.reference import load_reference
from infra.errors import BadInput


def main(reference: str, timeout_s: float, at_once: int, memory_gib: float) -> None:
    """Answers {"ready": true} or {"bad_input" | "raised": why}; then {start: {...}} with {}, {step: {...}} with {"turn"} and
    {close: id} with {}; or with {"raised": why}. Each has the request's number. Up to `at_once` are answered side by side."""
    limit = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # what it allocates; mapped libraries do not count
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    requests, replies = claim_pipes()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    try:
        environment = load_reference(reference)
        if not isinstance(environment, Interactive):
            raise BadInput(f"environment {reference!r} has no start(problem, seed): it is not interactive")
    except BadInput as error:
        return send(replies, {"bad_input": str(error)})
    except Exception as error:
        return send(replies, {"raised": describe(error)})
    send(replies, {"ready": True})
    episodes: dict[int, Episode] = {}
    lock = threading.Lock()

    def answer(request: dict[str, Any]) -> None:
        try:
            reply = _answer(environment, episodes, request)
        except Exception as error:
            reply = {"raised": describe(error)}
        with lock:
            send(replies, {"number": request["number"], **reply})

    # One at a time in this thread: code that is bound to its thread (SQLite's connections) or to the main one is all right.
    with ThreadPoolExecutor(at_once) if at_once > 1 else nullcontext() as threads:
        for line in requests:
            signal.setitimer(signal.ITIMER_PROF, 10 * timeout_s + 10)  # an orphan in C code ends by its processor time
            if threads is None:
                answer(loads(line))
            else:
                threads.submit(answer, loads(line))


def _answer(environment: Interactive, episodes: dict[int, Episode], request: dict[str, Any]) -> dict[str, Any]:
    if start := request.get("start"):
        episodes[start["id"]] = environment.start(Problem(**start["problem"]), start["seed"])
        return {}
    if step := request.get("step"):
        calls = tuple(ToolCall(**call) for call in step["tool_calls"])
        return {"turn": as_turn(episodes[step["id"]].step(Reply(step["text"], calls)))}
    close = getattr(episodes.pop(request["close"], None), "close", None)
    if close is not None:
        close()
    return {}


def as_turn(turn: Any) -> dict[str, Any]:
    """A turn as JSON. TypeError or ValueError for what is none: the caller must not have to guess."""
    if not isinstance(turn, Turn):
        raise TypeError(f"step() returned {type(turn).__name__}, not a Turn")
    for message in turn.messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise TypeError(f"a message is a mapping with the texts role and content, not {message!r:.200}")
        if message["role"] not in ("user", "tool", "system"):
            raise ValueError(f"an environment's message is of role user, tool or system, not {message['role']!r}")
    if not turn.done and not turn.messages:
        raise ValueError("step() returned a turn that is not done and has no message: there is nothing to reply to")
    reward = None if turn.reward is None else float(turn.reward)
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the turn's reward is {reward}")
    return {"messages": [dict(message) for message in turn.messages], "reward": reward, "done": bool(turn.done)}


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
