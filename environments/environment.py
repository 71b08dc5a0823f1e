"""What an environment is: a name, a reward, and, where it can make them up, problems."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

Split = Literal["train", "heldout"]
Reward = float | Mapping[str, float]


class Message(TypedDict):
    """One chat turn; `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """One thing to solve. `answer` and `metadata` must survive JSON: that is how the reward gets them back."""

    prompt: list[Message] | str
    """Chat messages, rendered with the model's chat template; or raw text, taken as it is."""
    answer: Any = None
    """What the reward compares with."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Anything else that the reward needs (tests to run, units, tolerance)."""


@runtime_checkable
class Environment(Protocol):
    """The least that an environment must have. Three more methods are optional:

    `parse_answer(answer) -> Any`: see `ParsesAnswers`; without it the reward gets answers as the dataset has them.
    `problems(split, n, seed) -> Iterable[Problem]`: see `GeneratesProblems`; without it prompts come from a dataset.
    `solution(problem) -> str`: see `Demonstrates`; a text that earns the full reward, for supervised warm starts.
    """

    name: str

    def reward(self, response: str, answer: Any, metadata: Mapping[str, Any]) -> Reward:
        """The reward of one response, or its named parts (their weighted sum is the reward).

        Pure: same arguments, same value, no state. It runs in a process of its own, one call at a time; one that
        raises, exceeds the time limit or returns NaN costs its own sample only.
        """
        ...


@runtime_checkable
class ParsesAnswers(Protocol):
    """An environment that knows what an answer is."""

    def parse_answer(self, answer: Any) -> Any:
        """What the reward compares with, made of a dataset's answer: asked once for each row, when the dataset is prepared.

        A CSV has text only, and a row without an answer None. Raises ValueError that says what an answer is.
        """
        ...


@runtime_checkable
class GeneratesProblems(Protocol):
    """An environment that makes up its own problems."""

    def problems(self, split: Split, n: int | None, seed: int) -> Iterable[Problem]:
        """`n` distinct problems (None: all there are), deterministic in the arguments.

        No problem is in both splits, whatever the seeds: runs with different seeds are compared on one held-out set.
        """
        ...


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that can show a right response."""

    def solution(self, problem: Problem) -> str:
        """A response that earns the full reward."""
        ...
