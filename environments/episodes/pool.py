"""Episodes in processes of their own, rebuilt from their replies when a process was lost."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.environment import Reply
from environments.pipes import ask, receive
from infra.errors import BadInput, Transient

START_TIMEOUT_S = 120.0
"""An environment may import a lot before it is ready."""
FAULTS = ("raised", "timeout", "crashed", "unrepeatable")
"""Why an environment has no answer."""


@dataclass(frozen=True)
class Fault:
    """Why an episode cannot go on."""

    cause: str
    detail: str


@dataclass
class Open:
    """An episode as the caller has it: all that rebuilds it."""

    problem: dict[str, Any]
    """Fields of `environments.Problem`."""
    seed: int
    steps: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """Replies and the turns that answered them, as JSON."""
    generation: int = -1
    """The start of its process that it lives in."""


class EpisodePool:
    """Some processes of one interactive environment. An episode belongs to the process of its number."""

    def __init__(self, reference: str, timeout_s: float, workers: int = 1, python: str | None = None) -> None:
        """reference: as `environments.located` gives it. timeout_s: of a step. python: an interpreter; None: this one."""
        self._hosts = [_Host(reference, timeout_s, python) for _ in range(workers)]
        self._episodes: list[Open] = []

    def start(self, problems: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[Fault | None]:
        """Open an episode for each problem (fields of `environments.Problem`); they are numbered on from the last."""
        first = len(self._episodes)
        self._episodes += [Open(problem, seed) for problem, seed in zip(problems, seeds, strict=True)]
        opened: dict[int, dict[str, Any] | None] = dict.fromkeys(range(first, len(self._episodes)))
        answers = self._each(opened)
        return [answer if isinstance(answer, Fault) else None for answer in answers.values()]

    def step(self, replies: dict[int, Reply]) -> dict[int, dict[str, Any] | Fault]:
        """{episode: its answer {messages, reward, done}} to {episode: reply}."""
        given: dict[int, dict[str, Any] | None] = {
            index: {"text": reply.text, "tool_calls": [vars(call) for call in reply.tool_calls]}
            for index, reply in replies.items()
        }
        return {index: answer or {} for index, answer in self._each(given).items()}

    def close(self) -> None:
        """End the processes and forget the episodes."""
        for host in self._hosts:
            host.close()
        self._episodes.clear()

    def pids(self) -> list[int]:
        """Of the processes that live."""
        return [host.process.pid for host in self._hosts if host.process is not None]

    def finish(self, indices: Sequence[int]) -> None:
        """These episodes are over: what their process holds of them is given back."""
        for index in indices:
            self._host(index).forget(index, self._episodes[index])

    def _host(self, index: int) -> "_Host":
        return self._hosts[index % len(self._hosts)]

    def _each(self, given: dict[int, dict[str, Any] | None]) -> dict[int, dict[str, Any] | Fault | None]:
        """Every process works through its episodes in their order, side by side with the others."""

        def work(host: "_Host") -> dict[int, dict[str, Any] | Fault | None]:
            own = [index for index in given if self._host(index) is host]
            return {index: host.advance(index, self._episodes[index], given[index]) for index in own}

        with ThreadPoolExecutor(len(self._hosts)) as threads:
            answers = {index: one for part in threads.map(work, self._hosts) for index, one in part.items()}
        return {index: answers[index] for index in given}


class _Host:
    """One process, started again when it was lost."""

    def __init__(self, reference: str, timeout_s: float, python: str | None) -> None:
        self._reference, self._timeout_s, self._python = reference, timeout_s, python
        self.process: subprocess.Popen[bytes] | None = None
        self._generation = 0

    def advance(self, index: int, episode: Open, reply: dict[str, Any] | None) -> dict[str, Any] | Fault | None:
        """The answer to a reply; None when there is none and the episode is only opened."""
        detail = ""
        for _ in range(2):  # a process that was killed by others answers the second time
            try:
                if fault := self._rebuild(index, episode):
                    return fault
                if reply is None:
                    return None
                answer = self._step(index, reply)
            except TimeoutError:
                self.close()
                return Fault("timeout", f"no answer within {self._timeout_s:g} s")
            except (EOFError, BrokenPipeError):
                detail = f"the environment's process ended (exit code {self.close(grace_s=1.0)})"
                continue
            if isinstance(answer, dict):
                episode.steps.append((reply, answer))
            return answer
        return Fault("crashed", detail)

    def forget(self, index: int, episode: Open) -> None:
        """Close an episode, where it lives."""
        if self.process is None or episode.generation != self._generation:
            return
        try:
            ask(self.process, {"close": index}, self._timeout_s)
        except (TimeoutError, EOFError, BrokenPipeError):
            self.close()

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process, if there is one, by a kill after `grace_s`; returns its exit code."""
        process, self.process = self.process, None
        if process is None:
            return None
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        return process.returncode

    def _rebuild(self, index: int, episode: Open) -> Fault | None:
        """Bring the episode into the living process: what was replied before is replied again."""
        process = self.process or self._start()
        if episode.generation == self._generation:
            return None
        reply = ask(
            process, {"start": {"id": index, "problem": episode.problem, "seed": episode.seed}}, self._timeout_s
        )
        if "raised" in reply:
            return Fault("raised", reply["raised"])
        for given, before in episode.steps:
            answer = self._step(index, given)
            if answer != before:
                now = answer.detail if isinstance(answer, Fault) else answer
                return Fault("unrepeatable", f"asked again the environment answered {now!r:.200}, not {before!r:.200}")
        episode.generation = self._generation
        return None

    def _step(self, index: int, reply: dict[str, Any]) -> dict[str, Any] | Fault:
        assert self.process is not None
        answer = ask(self.process, {"step": {"id": index, **reply}}, self._timeout_s)
        return Fault("raised", answer["raised"]) if "raised" in answer else answer["turn"]

    def _start(self) -> "subprocess.Popen[bytes]":
        root = str(Path(__file__).parents[2])
        # Another interpreter has packages of its own; ours would get in their way.
        path = root if self._python else os.pathsep.join(entry for entry in sys.path if entry)
        command = [self._python or sys.executable, "-m", "environments.episodes.worker", self._reference]
        try:
            process = self.process = subprocess.Popen(
                [*command, str(self._timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path},
            )
        except OSError as error:
            raise BadInput(f"episodes.python {self._python!r} cannot be started: {error.strerror}") from None
        self._generation += 1
        try:
            reply = receive(process, START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            self.close()
            raise Transient(
                f"environment {self._reference!r}: its process did not start ({error or 'it ended'})"
            ) from None
        if "ready" not in reply:
            self.close()
            raise BadInput(
                reply.get("bad_input") or f"environment {self._reference!r} does not load: {reply.get('raised')}"
            )
        return process
