"""The environment's own solutions of prompts, for a supervised warm start."""

import json

import pyarrow as pa

from environments import Problem, load_reference, own_fault
from environments.environment import Demonstrates
from infra.errors import BadInput
from infra.records import DEMONSTRATION


def demonstrate(prompts: pa.Table) -> pa.Table:
    """A table (DEMONSTRATION) with the solution of each of `prompts` (PROMPT), in their order.

    Raises BadInput for an environment without solutions, and for a solution that is no text.
    """
    environments: dict[str, Demonstrates] = {}
    for name in prompts["environment"].unique().to_pylist():
        environment = load_reference(name)
        if not isinstance(environment, Demonstrates):
            raise BadInput(
                f"warm_start: environment {environment.name!r} has no solution(problem); give it one, or set "
                "warm_start.steps to 0"
            )
        environments[name] = environment
    rows = []
    for row in prompts.to_pylist():
        prompt = json.loads(row["messages"]) if row["messages"] else row["text"]
        problem = Problem(prompt=prompt, answer=json.loads(row["answer"]), metadata=json.loads(row["metadata"]))
        try:
            solution = environments[row["environment"]].solution(problem)
        except Exception as error:
            what = f"solution() of prompt {row['prompt_id']} failed"
            raise own_fault(row["environment"], what, error) from error
        if not isinstance(solution, str):
            raise BadInput(
                f"warm_start: the solution of prompt {row['prompt_id']} is {type(solution).__name__}, not text"
            )
        rows.append({**{name: row[name] for name in ("prompt_id", "messages", "text")}, "solution": solution})
    return pa.Table.from_pylist(rows, schema=DEMONSTRATION)
