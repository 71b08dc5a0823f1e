"""What an environment is: a name, a reward, and, where it can make them up, problems."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict, runtime_checkable

Split = Literal["train", "heldout"]
Reward = float | Mapping[str, float]
REWARD_KEYWORDS = ("response_ids", "finish_reason")
"""What a reward is given besides response, answer and metadata, if it names it."""


class Message(TypedDict):
    """One chat turn; `role` is system, user, assistant or tool. All of it reaches the model's chat template."""

    role: str
    content: str | None
    """None only beside tool_calls."""
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    """Of an assistant: [{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}]."""
    tool_call_id: NotRequired[str]
    """Of a tool: the call that it answers."""
    reasoning_content: NotRequired[str]
    """Of an assistant: its thoughts, as some templates call them; others say reasoning or thinking."""
    reasoning: NotRequired[str]
    thinking: NotRequired[str]


@dataclass(frozen=True)
class Problem:
    """One thing to solve. `answer` and `metadata` must survive JSON: that is how the reward gets them back."""

    prompt: list[Message] | str
    """Chat messages, rendered with the model's chat template; or raw text, taken as it is."""
    answer: Any = None
    """What the reward compares with."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Anything else that the reward needs (tests to run, units, tolerance)."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the chat template offers to the model, as JSON schemas ({"type": "function", "function": {...}})."""


@runtime_checkable
class Environment(Protocol):
    """The least that an environment must have. Four more methods are optional:

    `parse_answer(answer) -> Any`: see `ParsesAnswers`; without it the reward gets answers as the dataset has them.
    `problems(split, n, seed) -> Iterable[Problem]`: see `GeneratesProblems`; without it prompts come from a dataset.
    `solution(problem) -> str`: see `Demonstrates`; a text that earns the full reward, for supervised warm starts.
    `start(problem, seed) -> Episode`: see `Interactive`; without it there is one reply and its reward.
    """

    name: str

    def reward(self, response: str, answer: Any, metadata: Mapping[str, Any]) -> Reward:
        """The reward of one response, or its named parts (their weighted sum is the reward).

        A reward may have more, each by a keyword argument of the name (`REWARD_KEYWORDS`):
        - response_ids, list[int]: the tokens as they were sampled, with the one that ended the response if one did;
        - finish_reason, str: "stop" when the model ended its response, "length" when it was cut.

        `response` is those tokens' text, special tokens included, less the one that ended it.
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


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, well-formed: the tool is offered and its arguments fit its schema."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the policy said in one turn."""

    text: str
    """All of it as it was sampled, special tokens too, less the token that ended it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an environment with `tools`: what the reply calls, in its order."""


@dataclass(frozen=True)
class Turn:
    """What an environment answers to a reply."""

    messages: list[Message] = field(default_factory=list)
    """What the policy sees next: of role tool or user, as its chat template has them. Not looked at when `done`."""
    reward: float | None = None
    """Of this turn. An episode's reward is the sum; where no turn has any, `Environment.reward` judges the last reply."""
    done: bool = False


@runtime_checkable
class Episode(Protocol):
    """One conversation about one problem."""

    def step(self, reply: Reply) -> Turn:
        """The answer to a reply. A function of problem, seed and the replies so far, and of nothing else.

        A lost process's episodes are rebuilt from their replies. One that raises, exceeds the time limit or answers
        otherwise when it is rebuilt costs its own sample only.
        """
        ...


@runtime_checkable
class Interactive(Protocol):
    """An environment of several turns. It may have `tools`, JSON schemas as in `Problem.tools`, offered with every problem
    that brings none. Its episodes may have `close()`, which gives back what they hold."""

    def start(self, problem: Problem, seed: int) -> Episode:
        """A new episode; the problem's prompt is what the policy sees first."""
        ...
