"""A task for tests: any text earns some reward, so that even a random policy has something to learn from."""

from collections.abc import Iterable, Mapping
from typing import Any

from environments import Problem


class Checksum:
    name = "checksum"

    def problems(self, split: str, n: int | None, seed: int) -> Iterable[Problem]:
        start, count = (0, 12) if split == "train" else (100, 4)
        for i in range(start, start + min(n or count, count)):
            yield Problem(prompt=[{"role": "user", "content": f"say {i}"}], answer=i)

    def reward(self, response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        return (sum(response.encode()) + answer) % 7 / 6


def load_environment() -> Checksum:
    return Checksum()
