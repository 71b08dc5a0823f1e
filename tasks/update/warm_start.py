"""A supervised warm start: some steps on solutions, for a model that could not earn a first reward otherwise."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from infra.errors import BadInput
from infra.models.catalog import vocab_size
from infra.models.chat import prompt_ids
from infra.models.vocabulary import first_foreign, foreign_fault
from tasks.update.config import WarmStartConfig

if TYPE_CHECKING:
    from tasks.update.group import TrainerGroup
    from tasks.update.trainer import Trainer

Pair = tuple[list[int], list[int]]
"""Token ids of a prompt, and of its solution with the end of the turn."""


def warm_start(
    trainer: "Trainer | TrainerGroup", model_dir: str, table: pa.Table, config: WarmStartConfig, seed: int
) -> dict[str, float]:
    """Train on a table of schema DEMONSTRATION; the mean negative log-likelihood a token at the first and last step."""
    pairs = tokenized(table, model_dir)
    losses = trainer.supervise(list(batches(pairs, config, seed)), config.lr)
    return {"loss_first": losses[0], "loss_last": losses[-1], "steps": float(len(losses))}


def tokenized(table: pa.Table, model_dir: str) -> list[Pair]:
    """Prompts as the rollout engine renders them, solutions as the model is to write them."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    end, size = tokenizer.eos_token_id, vocab_size(Path(model_dir))
    if end is None:
        raise BadInput(f"warm_start: the tokenizer of {model_dir} has no end-of-sequence token to end a solution with")
    pairs = []
    for row in table.to_pylist():
        prompt = prompt_ids(tokenizer, row)
        solution = list(tokenizer(row["solution"], add_special_tokens=False)["input_ids"])
        if solution[-1:] != [end]:  # one that brings its end along gets no second one
            solution.append(end)
        if (token := first_foreign([*prompt, *solution], size)) is not None:
            text = tokenizer.convert_ids_to_tokens(token)
            raise BadInput(f"warm_start: prompt {row['prompt_id']!r}: {foreign_fault(token, text, size)}")
        pairs.append((prompt, solution))
    return pairs


def batches(pairs: list[Pair], config: WarmStartConfig, seed: int) -> Iterator[list[Pair]]:
    """`config.steps` batches; every pair comes once before any comes again."""
    rng = np.random.default_rng(seed)
    order: list[int] = []
    for _ in range(config.steps):
        while len(order) < config.samples_per_step:
            order += rng.permutation(len(pairs)).tolist()
        chosen, order = order[: config.samples_per_step], order[config.samples_per_step :]
        yield [pairs[index] for index in chosen]
