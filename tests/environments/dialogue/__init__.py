"""Several turns for tests: slow enough to be killed in one, and any text earns some reward."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from environments import Problem, Reply, Turn


class Dialogue:
    def __init__(self, number: int) -> None:
        self.said = [number]

    def step(self, reply: Reply) -> Turn:
        time.sleep(0.02)
        self.said.append(sum(reply.text.encode()))
        done = len(self.said) == 4
        return Turn([{"role": "user", "content": str(sum(self.said) % 10)}], reward=self.said[-1] % 7 / 6, done=done)


class Dialogues:
    name = "dialogue"

    def start(self, problem: Problem, seed: int) -> Dialogue:
        return Dialogue(problem.answer)

    def reward(self, response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        return 0.0

    def problems(self, split: str, n: int | None, seed: int) -> Iterable[Problem]:
        start, count = (0, 12) if split == "train" else (100, 4)
        for i in range(start, start + min(n or count, count)):
            yield Problem(prompt=[{"role": "user", "content": f"say {i}"}], answer=i)


def load_environment() -> Dialogues:
    return Dialogues()
