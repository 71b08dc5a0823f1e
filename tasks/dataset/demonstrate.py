"""The environment's own solutions of prompts, for a supervised warm start."""

import json
from pathlib import Path

import pyarrow as pa

from environments import Problem, load_reference, located, own_fault
from environments.environment import Demonstrates
from infra.errors import BadInput
from infra.models.catalog import vocab_size
from infra.models.chat import chat_of
from infra.models.vocabulary import first_foreign, foreign_fault, foreign_tokens
from infra.storage.schemas import DEMONSTRATION


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
        prompt, tools = chat_of(row) if row["messages"] else (row["text"], None)
        answer, metadata = json.loads(row["answer"]), json.loads(row["metadata"])
        problem = Problem(prompt=prompt, answer=answer, metadata=metadata, tools=tools)
        try:
            solution = environments[row["environment"]].solution(problem)
        except Exception as error:
            what = f"solution() of prompt {row['prompt_id']} failed"
            raise own_fault(located(row["environment"]), what, error) from error
        if not isinstance(solution, str):
            raise BadInput(
                f"warm_start: the solution of prompt {row['prompt_id']} is {type(solution).__name__}, not text"
            )
        rows.append({**row, "solution": solution})
    return pa.Table.from_pylist(rows, schema=DEMONSTRATION)


def check_tokens(demonstrations: pa.Table, model: Path) -> None:
    """Raises BadInput for a solution (of a table DEMONSTRATION) with a token that the model has no row for, found before
    the trainer meets it. Prompts are checked with the rollouts'."""
    foreign = foreign_tokens(model)
    if not foreign:
        return
    from tokenizers import Tokenizer

    tokenizer, size = Tokenizer.from_file(str(model / "tokenizer.json")), vocab_size(model)
    for row in demonstrations.to_pylist():
        ids = tokenizer.encode(row["solution"], add_special_tokens=False).ids
        if (token := first_foreign(ids, size)) is not None:
            raise BadInput(
                f"warm_start: the solution of prompt {row['prompt_id']} ({row['solution'][:80]!r}): "
                + foreign_fault(token, foreign.get(token), size)
            )
