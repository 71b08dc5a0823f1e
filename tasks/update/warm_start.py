"""A supervised warm start: some steps on solutions, for a model that could not earn a first reward otherwise."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from infra.errors import BadInput
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
    if tokenizer.eos_token_id is None:
        raise BadInput(f"warm_start: the tokenizer of {model_dir} has no end-of-sequence token to end a solution with")
    pairs = []
    for row in table.to_pylist():
        if row["messages"]:
            prompt = tokenizer.apply_chat_template(
                json.loads(row["messages"]), tokenize=True, add_generation_prompt=True, return_dict=False
            )
        else:
            prompt = tokenizer(row["text"])["input_ids"]
        solution = tokenizer(row["solution"], add_special_tokens=False)["input_ids"]
        pairs.append((list(prompt), [*solution, tokenizer.eos_token_id]))
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
