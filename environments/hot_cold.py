"""A game of several turns: find a hidden number by guesses that are told higher or lower."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

from environments.environment import Problem, Reply, Split, Turn
from environments.numbers import last_number


class Game:
    """Guesses until the number is found or none are left."""

    def __init__(self, answer: int, guesses: int) -> None:
        self._answer, self._guesses, self._used = answer, guesses, 0

    def step(self, reply: Reply) -> Turn:
        """1 for the number, less a tenth for each guess before it; 0 when none are left."""
        self._used += 1
        guess = last_number(reply.text)
        if guess == self._answer:
            return Turn(reward=max(0.1, 1.0 - 0.1 * (self._used - 1)), done=True)
        if self._used == self._guesses:
            return Turn(reward=0.0, done=True)
        told = "That is no number." if guess is None else "Higher." if guess < self._answer else "Lower."
        return Turn([{"role": "user", "content": f"{told} Guess again."}])


class HotCold:
    """1..high; some numbers are held out."""

    name = "hot_cold"

    def __init__(self, high: int, guesses: int) -> None:
        self._high, self._guesses = high, guesses

    def start(self, problem: Problem, seed: int) -> Game:
        """See `Interactive`."""
        return Game(problem.answer, self._guesses)

    def reward(self, response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        """Of a reply that no turn judged: it was cut."""
        return 0.0

    def problems(self, split: Split, n: int | None, seed: int) -> Iterable[Problem]:
        """A number a problem; its place in the prompt tells games of one number apart from those of another."""
        own = [number for number in range(1, self._high + 1) if (number % 5 == 0) == (split == "heldout")]
        random.Random(seed).shuffle(own)
        names = random.Random(f"{seed} {split}").sample(range(10**6), len(own))
        return [
            Problem(
                [
                    {
                        "role": "user",
                        "content": f"Game {name}: guess my number from 1 to {self._high}. Reply with a number only.",
                    }
                ],
                answer=number,
            )
            for name, number in list(zip(names, own, strict=True))[:n]
        ]


def load_environment(high: int = 60, guesses: int = 6) -> HotCold:
    """high: the largest number. guesses: how many replies a game has."""
    return HotCold(high, guesses)
