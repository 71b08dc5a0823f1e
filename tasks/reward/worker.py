"""The process that runs an environment's reward: one JSON line in, one out, until its input ends.

A process, not a thread: a verifier caught in a regular expression holds the interpreter's lock, and only a kill ends it.
A program, not a fork: nothing of the caller's threads, weights or main module comes along.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from environments import Environment, load_reference, reward_keywords
from environments.pipes import claim_pipes, describe, end_with, send
from infra.errors import BadInput


def main(reference: str, timeout_s: float) -> None:
    """Answers {"ready": {keyword: needed}} or {"bad_input" | "raised": why}, then each request {response, answer,
    metadata, and of environments.environment.REWARD_KEYWORDS those that the reward names}."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    requests, replies = claim_pipes()
    parent = os.getppid()
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    try:
        environment = load_reference(reference)
    except BadInput as error:
        return send(replies, {"bad_input": str(error)})
    except Exception as error:
        return send(replies, {"raised": describe(error)})
    send(replies, {"ready": reward_keywords(environment)})
    for line in requests:
        # An orphan in a loop of C code would never see that its parent is gone: its own processor time ends it.
        # (Not SIGALRM, which verifiers use for timeouts of their own.)
        signal.setitimer(signal.ITIMER_PROF, 10 * timeout_s + 10)
        send(replies, _reply(environment, json.loads(line)))


def _reply(environment: Environment, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"parts": as_parts(environment.reward(**request))}
    except Exception as error:
        return {"raised": describe(error)}


def as_parts(reward: Any) -> dict[str, float]:
    """A reward as named parts; a plain number is the part "reward". TypeError for what is no number."""
    parts = reward if isinstance(reward, Mapping) else {"reward": reward}
    if not parts:
        raise TypeError("the reward returned no part")
    for name, value in parts.items():
        if not isinstance(name, str) or isinstance(value, str) or not hasattr(value, "__float__"):
            raise TypeError(f"a reward is a number or a mapping of names to numbers, not {reward!r:.200}")
    return {name: float(value) for name, value in parts.items()}


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
