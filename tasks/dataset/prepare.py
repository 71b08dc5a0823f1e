"""Source -> checked, deduplicated, split and shuffled prompt tables."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa

from environments import Environment, environment_reference, load_environment
from infra.errors import BadInput
from infra.models.chat import prompt_ids
from infra.storage.schemas import PROMPT
from tasks.dataset.config import DatasetConfig
from tasks.dataset.rows import Prompt, parse_row
from tasks.dataset.sources import Row, read_split

Length = Callable[[Prompt], int]


@dataclass(frozen=True)
class Prepared:
    """Two disjoint tables (schema PROMPT), and what was left out, by cause."""

    train: pa.Table
    heldout: pa.Table
    dropped: dict[str, int] = field(default_factory=dict)


def prepare(config: DatasetConfig, tokenized_length: Length | None = None) -> Prepared:
    """Read the source and make the train and held-out tables; the same settings and data give the same tables.

    tokenized_length counts a prompt's tokens (see `length_in_tokens`); max_prompt_tokens needs it, and longer prompts are
    dropped and counted. Raises BadInput that names file, row and column for a malformed row, and for a split without
    prompts.
    """
    if config.max_prompt_tokens is not None and tokenized_length is None:
        raise BadInput("dataset.max_prompt_tokens counts a model's tokens: name the model, or leave the setting out")
    environment = load_environment(config.environment, **config.environment_args)
    dropped: Counter[str] = Counter(duplicate=0, too_long=0, also_heldout=0)
    train = _read(config, environment, "train", tokenized_length, dropped)
    heldout = _read(config, environment, "heldout", tokenized_length, dropped)
    if not train:
        raise BadInput(f"dataset ({_source(config)}): no train prompts are left; dropped: {dict(dropped)}")
    if heldout is None:
        heldout, train = _hold_out(train, config.heldout_size)
        if not train:
            raise BadInput(
                f"dataset ({_source(config)}): all {len(heldout)} prompts are held out; lower dataset.heldout_size"
            )
    shown = {prompt.seen for prompt in heldout.values()}  # with whatever metadata: it would have been trained on
    both = {key for key, prompt in train.items() if prompt.seen in shown}
    # The held-out side keeps what is on both: the other way round, adding train data would shrink the evaluation.
    dropped["also_heldout"] += len(both)
    train = {key: prompt for key, prompt in train.items() if key not in both}
    if not train:
        raise BadInput(f"dataset ({_source(config)}): every train prompt is also held out")
    reference = environment_reference(config.environment, config.environment_args)
    return Prepared(
        train=_table(_shuffled(train, config.seed)[: config.train_size], reference),
        heldout=_table(_shuffled(heldout, config.seed)[: config.heldout_size], reference),
        dropped=dict(dropped),
    )


def first_prompts(config: DatasetConfig, rows: int) -> dict[str, pa.Table]:
    """The prompts of the first rows of each split that the source has (schema PROMPT), without those behind them.

    Raises BadInput for an environment that does not load, and for a source or a row that `prepare` would refuse.
    """
    environment = load_environment(config.environment, **config.environment_args)
    reference = environment_reference(config.environment, config.environment_args)
    found: dict[str, pa.Table] = {}
    for split in ("train", "heldout"):
        read = read_split(config, environment, split)
        if read is not None:
            found[split] = _table([parse_row(row, config, environment) for row in islice(read, rows)], reference)
    return found


def length_in_tokens(tokenizer: Any) -> Length:
    """Counts a prompt's tokens as the rollout engine does: messages through the chat template, text as it is."""

    return lambda prompt: len(prompt_ids(tokenizer, vars(prompt)))


def _read(
    config: DatasetConfig, environment: Environment, split: Any, length: Length | None, dropped: Counter[str]
) -> dict[str, Prompt] | None:
    rows = read_split(config, environment, split)
    return None if rows is None else _unique(rows, config, environment, length, dropped)


def _unique(
    rows: Iterable[Row],
    config: DatasetConfig,
    environment: Environment,
    length: Length | None,
    dropped: Counter[str],
) -> dict[str, Prompt]:
    """Prompts by id, the first of equal ones."""
    prompts: dict[str, Prompt] = {}
    for row in rows:
        prompt = parse_row(row, config, environment)
        if prompt.prompt_id in prompts:
            if prompt.answer != prompts[prompt.prompt_id].answer:
                raise BadInput(
                    f"{row.where}: the same prompt occurs above with another answer "
                    f"({prompts[prompt.prompt_id].answer[:80]}, here {prompt.answer[:80]}); keep one of the two"
                )
            dropped["duplicate"] += 1
        elif (
            length is not None
            and config.max_prompt_tokens is not None
            and (_counted(row, prompt, length) > config.max_prompt_tokens)
        ):
            dropped["too_long"] += 1
        else:
            prompts[prompt.prompt_id] = prompt
    return prompts


def _counted(row: Row, prompt: Prompt, length: Length) -> int:
    try:
        return length(prompt)
    except BadInput as error:
        raise BadInput(f"{row.where}: {error}") from error


def _hold_out(prompts: dict[str, Prompt], size: int | None) -> tuple[dict[str, Prompt], dict[str, Prompt]]:
    """(held out, the rest). Chosen by content alone: neither the seed nor the rows' order changes who is held out."""
    if size is None:
        size = min(200, len(prompts) // 10)
    order = sorted(prompts, key=lambda key: _draw(f"heldout:{key}"))
    return {key: prompts[key] for key in order[:size]}, {key: prompts[key] for key in order[size:]}


def _shuffled(prompts: dict[str, Prompt], seed: int) -> list[Prompt]:
    return [prompts[key] for key in sorted(prompts, key=lambda key: _draw(f"{seed}:{key}"))]


def _draw(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _table(prompts: list[Prompt], environment: str) -> pa.Table:
    rows = [
        {
            "prompt_id": p.prompt_id,
            "environment": environment,
            "messages": p.messages,
            "text": p.text,
            "answer": p.answer,
            "metadata": p.metadata,
            "tools": p.tools,
        }
        for p in prompts
    ]
    return pa.Table.from_pylist(rows, schema=PROMPT)


def _source(config: DatasetConfig) -> str:
    return f"environment {config.environment}" if config.path is None else f"{config.source} {config.path}"
