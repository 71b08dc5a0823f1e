"""Episodes in processes of their own, rebuilt from their replies when a process was lost."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from environments.environment import Reply
from environments.episodes.process import EpisodeProcess

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
    process: EpisodeProcess | None = None
    """Which it lives in."""


Answer = dict[str, Any] | Fault | None
"""A turn as JSON; None for an episode that was only opened."""


class EpisodePool:
    """Some processes of one interactive environment. An episode belongs to the process of its number."""

    def __init__(
        self,
        reference: str,
        timeout_s: float,
        workers: int = 1,
        python: str | None = None,
        at_once: int = 1,
        memory_gib: float = 8.0,
    ) -> None:
        """reference: as `environments.located` gives it. timeout_s: of a step. python: an interpreter; None: this one.
        at_once: episodes of a process that take a step side by side. memory_gib: of a process."""
        started = partial(EpisodeProcess, reference, timeout_s, python, at_once, memory_gib)
        self._hosts = [_Host(started, timeout_s, at_once) for _ in range(workers)]
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

    def _each(self, given: dict[int, dict[str, Any] | None]) -> dict[int, Answer]:
        """Every process works through its episodes, side by side with the others."""

        def work(host: "_Host") -> dict[int, Answer]:
            own = {index: reply for index, reply in given.items() if self._host(index) is host}
            return host.advance({index: self._episodes[index] for index in own}, own)

        with ThreadPoolExecutor(len(self._hosts)) as threads:
            answers = {index: one for part in threads.map(work, self._hosts) for index, one in part.items()}
        return {index: answers[index] for index in given}


class _Lost(Exception):
    """The process ended without an answer, by whoever's doing."""


class _Host:
    """One process, started again when it was lost."""

    def __init__(self, start: Callable[[], EpisodeProcess], timeout_s: float, at_once: int) -> None:
        self._start, self._timeout_s, self._at_once = start, timeout_s, at_once
        self.process: EpisodeProcess | None = None

    def advance(self, episodes: Mapping[int, Open], replies: Mapping[int, dict[str, Any] | None]) -> dict[int, Answer]:
        """The answers to {episode: reply}."""
        answers: dict[int, Answer] = {}
        if self._at_once > 1:
            answers = self._together(episodes, replies)
        # Where a process was lost under several, which of them it was shows when each is alone.
        return answers | {
            index: self._alone(index, episodes[index], reply)
            for index, reply in replies.items()
            if index not in answers
        }

    def forget(self, index: int, episode: Open) -> None:
        """Close an episode, where it lives."""
        if self.process is None or episode.process is not self.process:
            return
        try:
            self.process.ask({"close": index})
        except (TimeoutError, EOFError):
            self.close()

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process, if there is one, by a kill after `grace_s`; returns its exit code."""
        process, self.process = self.process, None
        return None if process is None else process.close(grace_s)

    def _together(
        self, episodes: Mapping[int, Open], replies: Mapping[int, dict[str, Any] | None]
    ) -> dict[int, Answer]:
        """Answers that were given side by side, without those of a process that was lost."""
        answers: dict[int, Answer] = {}
        losses = 0  # a process that was killed by others answers the second time
        while losses < 2 and (left := [index for index in replies if index not in answers]):
            process = self._started()

            def attempt(index: int, process: EpisodeProcess = process) -> Answer:
                try:
                    return self._advance(process, index, episodes[index], replies[index])
                except TimeoutError:
                    process.close()  # the others are asked again
                    return self._too_late()

            got: dict[int, Answer] = {}
            with ThreadPoolExecutor(self._at_once) as threads:
                for index, future in [(index, threads.submit(attempt, index)) for index in left]:
                    try:
                        got[index] = future.result()
                    except _Lost:
                        continue
            answers |= got
            late = any(isinstance(one, Fault) and one.cause == "timeout" for one in got.values())
            if late or len(got) < len(left):
                self.close()
                losses += not late  # of a late one it is known which it was
        return answers

    def _alone(self, index: int, episode: Open, reply: dict[str, Any] | None) -> Answer:
        detail = ""
        for _ in range(2):  # a process that was killed by others answers the second time
            try:
                return self._advance(self._started(), index, episode, reply)
            except TimeoutError:
                self.close()
                return self._too_late()
            except _Lost:
                detail = f"the environment's process ended (exit code {self.close(grace_s=1.0)})"
        return Fault("crashed", detail)

    def _advance(self, process: EpisodeProcess, index: int, episode: Open, reply: dict[str, Any] | None) -> Answer:
        """The answer to a reply. Raises TimeoutError, and _Lost when the process has ended."""
        try:
            if fault := self._rebuild(process, index, episode):
                return fault
            if reply is None:
                return None
            answer = _step(process, index, reply)
        except EOFError:
            raise _Lost from None
        if isinstance(answer, dict):
            episode.steps.append((reply, answer))
        return answer

    def _rebuild(self, process: EpisodeProcess, index: int, episode: Open) -> Fault | None:
        """Bring the episode into the living process: what was replied before is replied again."""
        if episode.process is process:
            return None
        reply = process.ask({"start": {"id": index, "problem": episode.problem, "seed": episode.seed}})
        if "raised" in reply:
            return Fault("raised", reply["raised"])
        for given, before in episode.steps:
            answer = _step(process, index, given)
            if answer != before:
                now = answer.detail if isinstance(answer, Fault) else answer
                return Fault("unrepeatable", f"asked again the environment answered {now!r:.200}, not {before!r:.200}")
        episode.process = process
        return None

    def _too_late(self) -> Fault:
        return Fault("timeout", f"no answer within {self._timeout_s:g} s")

    def _started(self) -> EpisodeProcess:
        if self.process is None:
            self.process = self._start()
        return self.process


def _step(process: EpisodeProcess, index: int, reply: dict[str, Any]) -> dict[str, Any] | Fault:
    answer = process.ask({"step": {"id": index, **reply}})
    return Fault("raised", answer["raised"]) if "raised" in answer else answer["turn"]
