"""Questions that are a line of Python: the policy runs code as often as it likes, then answers with a number."""

import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from environments.environment import Problem, Reply, Split, Turn
from environments.numbers import last_number
from environments.sandbox import run_cell

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python code; returns what it prints and the value of its last line. Names live on.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
_CODE = re.compile(r"```python\s*(.+?)```", re.DOTALL | re.IGNORECASE)


def _digits(a: int, b: int) -> tuple[str, int]:
    return f"What is the sum of the digits of {a} to the power of {b}?", sum(int(digit) for digit in str(a**b))


def _primes(a: int, b: int) -> tuple[str, int]:
    low, high = a * 10, a * 10 + b * 10
    count = sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(max(low, 2), high + 1))
    return f"How many primes are there from {low} to {high}?", count


def _modulus(a: int, b: int) -> tuple[str, int]:
    return f"What is {a} to the power of {b} modulo 1009?", pow(a, b, 1009)


def _sequence(a: int, b: int) -> tuple[str, int]:
    first, second = a % 10, a // 10
    values = [first, second]
    while len(values) < b:
        values.append(values[-1] + values[-2])
    return (
        f"A sequence begins {first}, {second}; each next number is the sum of the two before. What is number {b}?",
        values[b - 1],
    )


QUESTIONS: tuple[Callable[[int, int], tuple[str, int]], ...] = (_digits, _primes, _modulus, _sequence)
"""(question, answer) of two numbers from 10 to 40."""


class Conversation:
    """Code gets its output; a reply without any is the answer."""

    def __init__(self, environment: "PythonTool", problem: Problem) -> None:
        self._environment, self._problem = environment, problem
        self._state: bytes | None = None

    def step(self, reply: Reply) -> Turn:
        """See `Episode`."""
        cells = [(call.id, call.arguments["code"]) for call in reply.tool_calls]
        if cells:
            return Turn([{"role": "tool", "content": self._run(code), "tool_call_id": name} for name, code in cells])
        found = None if self._environment.tools else _CODE.search(reply.text)
        if found:
            return Turn([{"role": "user", "content": f"{self._run(found[1])}\nAnswer now."}])
        return Turn(reward=self._environment.reward(reply.text, self._problem.answer, {}), done=True)

    def _run(self, code: str) -> str:
        cell = run_cell(code, self._state)
        self._state = cell.state
        return cell.output or "no output"


class PythonTool:
    """Powers, primes, remainders and sequences."""

    name = "python_tool"

    def __init__(self, protocol: str) -> None:
        self.tools = [TOOL] if protocol == "tools" else []

    def start(self, problem: Problem, seed: int) -> Conversation:
        """See `Interactive`."""
        return Conversation(self, problem)

    def reward(self, response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        """1 for a reply whose last number is the answer."""
        return float(last_number(response) == answer)

    def problems(self, split: Split, n: int | None, seed: int) -> Iterable[Problem]:
        """Every fifth question is held out."""
        every = [(kind, a, b) for kind in range(len(QUESTIONS)) for a in range(10, 41) for b in range(10, 41)]
        own = [one for one in every if (sum(one) % 5 == 0) == (split == "heldout")]
        random.Random(seed).shuffle(own)
        return [self._problem(*one) for one in own[:n]]

    def solution(self, problem: Problem) -> str:
        """The answer."""
        return str(problem.answer)

    def _problem(self, kind: int, a: int, b: int) -> Problem:
        question, answer = QUESTIONS[kind](a, b)
        how = "" if self.tools else " Run code between ```python and ```; when you know it, reply with the number only."
        return Problem([{"role": "user", "content": question + how}], answer=answer)


def load_environment(protocol: str = "text") -> PythonTool:
    """protocol: "tools" for a model whose chat template offers tools, "text" for any."""
    if protocol not in ("tools", "text"):
        raise ValueError(f"protocol must be tools or text, not {protocol!r}")
    return PythonTool(protocol)
