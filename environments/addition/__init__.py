"""Addition of two small numbers: enough for a 135M model to learn in minutes, and checkable to the digit."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from environments.environment import Message, Problem, Split
from environments.numbers import last_number
from infra.errors import BadInput

Operands = tuple[int, int]


@dataclass(frozen=True)
class Addition:
    """Sums of two numbers in low..high."""

    low: int
    high: int
    heldout: int
    name: str = "addition"

    def problems(self, split: Split, n: int | None, seed: int) -> Iterator[Problem]:
        """`n` problems of the split, in an order drawn by `seed`; BadInput when the split has fewer."""
        heldout, train = self._splits()
        chosen = sorted(heldout if split == "heldout" else train, key=lambda ab: _draw(f"{seed}:{ab}"))
        if n is not None and n > len(chosen):
            raise BadInput(f"addition has {len(chosen)} {split} problems with these settings, not {n}: raise `high`")
        for a, b in chosen[:n]:
            question = Message(role="user", content=f"What is {a} + {b}? Reply with the number only.")
            yield Problem(prompt=[question], answer=a + b)

    def parse_answer(self, answer: Any) -> float:
        """A number, or a number's text: "12" of a CSV is 12."""
        if isinstance(answer, bool) or not isinstance(answer, int | float | str):
            raise ValueError("a number is expected")
        try:
            number = float(answer)
        except ValueError:
            raise ValueError("a number is expected") from None
        if not math.isfinite(number):
            raise ValueError("a finite number is expected")
        return int(number) if number.is_integer() else number

    def reward(self, response: str, answer: float, metadata: Mapping[str, Any]) -> float:
        """1.0 when the last number of the response is the sum (matching the whole text is too sparse to learn from)."""
        return 1.0 if last_number(response) == answer else 0.0

    def solution(self, problem: Problem) -> str:
        """The sum, alone."""
        return str(problem.answer)

    def _splits(self) -> tuple[list[Operands], list[Operands]]:
        """(heldout, train). 3 + 5 and 5 + 3 are on one side, or held-out sums would have been seen in the mirror."""
        span = range(self.low, self.high + 1)
        pairs = sorted(((a, b) for a in span for b in span if a <= b), key=lambda ab: _draw(f"heldout:{ab}"))
        heldout: list[Operands] = []
        train: list[Operands] = []
        for a, b in pairs:
            mirrored = [(a, b)] if a == b else [(a, b), (b, a)]
            side = heldout if len(heldout) + len(mirrored) <= self.heldout else train
            side.extend(mirrored)
        return heldout, train


def load_environment(low: int = 1, high: int = 9, heldout: int = 17) -> Addition:
    """Sums of two numbers in low..high (both included), `heldout` of which are never trained on.

    The defaults leave 64 of 81 problems for training: eight steps of eight prompts are an epoch.
    """
    if not low <= high:
        raise BadInput(f"addition: low ({low}) must not exceed high ({high})")
    count = (high - low + 1) ** 2
    if count > 1_000_000:
        raise BadInput(f"addition: {low}..{high} makes {count:,} problems; at most 1,000,000 are enumerated")
    if not 0 <= heldout < count:
        raise BadInput(f"addition: heldout ({heldout}) must be in 0..{count - 1}: {low}..{high} makes {count} problems")
    return Addition(low=low, high=high, heldout=heldout)


def _draw(text: str) -> bytes:
    """A draw that is the same on every machine and in every Python."""
    return hashlib.sha256(text.encode()).digest()
