"""Products of two numbers, with a calculator: by the chat template's tools, or by the line `calc: 12 * 7`."""

import random
import re
from collections.abc import Iterable, Mapping
from typing import Any

from environments.environment import Message, Problem, Reply, Split, Turn
from environments.numbers import last_number

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_CALL = re.compile(r"calc:\s*(\d{1,9})\s*\*\s*(\d{1,9})")


class Conversation:
    """A reply with a call gets the product; one without is the answer."""

    def __init__(self, environment: "Calculator", problem: Problem) -> None:
        self._environment, self._problem = environment, problem

    def step(self, reply: Reply) -> Turn:
        """See `Episode`."""
        products = [(call.id, call.arguments["a"] * call.arguments["b"]) for call in reply.tool_calls]
        if products:
            return Turn([{"role": "tool", "content": str(number), "tool_call_id": name} for name, number in products])
        found = None if self._environment.tools else _CALL.search(reply.text)
        if found:
            return Turn([{"role": "user", "content": f"calc says {int(found[1]) * int(found[2])}. Answer now."}])
        return Turn(reward=self._environment.reward(reply.text, self._problem.answer, {}), done=True)


class Calculator:
    """What is a * b? low..high are the numbers."""

    name = "calculator"

    def __init__(self, low: int, high: int, protocol: str) -> None:
        self._numbers = range(low, high + 1)
        self.tools = [TOOL] if protocol == "tools" else []

    def start(self, problem: Problem, seed: int) -> Conversation:
        """See `Interactive`."""
        return Conversation(self, problem)

    def reward(self, response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        """1 for a reply whose last number is the product."""
        return float(last_number(response) == answer)

    def problems(self, split: Split, n: int | None, seed: int) -> Iterable[Problem]:
        """Every fifth pair is held out."""
        pairs = [(a, b) for a in self._numbers for b in self._numbers]
        own = [pair for pair in pairs if ((pair[0] * 7 + pair[1]) % 5 == 0) == (split == "heldout")]
        random.Random(seed).shuffle(own)
        return [self._problem(a, b) for a, b in own[:n]]

    def _problem(self, a: int, b: int) -> Problem:
        return Problem([*self._example(), {"role": "user", "content": f"What is {a} times {b}?"}], answer=a * b)

    def _example(self) -> list[Message]:
        """A conversation that shows the text protocol; a chat template explains its tools itself."""
        if self.tools:
            return []
        shown = ["What is 3 times 4?", "calc: 3 * 4", "calc says 12. Answer now.", "12"]
        return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(shown)]


def load_environment(low: int = 11, high: int = 60, protocol: str = "text") -> Calculator:
    """protocol: "tools" for a model whose chat template offers tools, "text" for any."""
    if protocol not in ("tools", "text"):
        raise ValueError(f"protocol must be tools or text, not {protocol!r}")
    return Calculator(low, high, protocol)
