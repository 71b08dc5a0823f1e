"""Prompts that do not fit the context: counted, and refused where a step would have none, before an engine is loaded."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from infra.errors import BadInput
from infra.models.catalog import prepare_model
from infra.records import PROMPT
from tasks.rollout.config import RolloutConfig
from tasks.rollout.lengths import rendered, token_counts, too_long
from tasks.rollout.requests import prompt_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("beam-tiny", tmp_path_factory.mktemp("models"))


def prompts_of(*contents: str, text: str = "") -> pa.Table:
    chats = [json.dumps([{"role": "user", "content": content}]) for content in contents]
    rows = [(chat, "") for chat in chats] + ([("", text)] if text else [])
    return pa.Table.from_pylist(
        [
            {"prompt_id": str(i), "environment": "e", "messages": chat, "text": raw, "answer": "1", "metadata": "{}"}
            for i, (chat, raw) in enumerate(rows)
        ],
        schema=PROMPT,
    )


def test_tokens_are_counted_as_the_engine_counts_them(model: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = prompts_of("What is 3 + 4?", "say <|end|> \n ü " * 9, text="Once upon a time")
    texts = rendered(model, prompts)
    assert texts is not None
    expected = [len(prompt_tokens(tokenizer, row)) for row in prompts.to_pylist()]
    assert token_counts(model / "tokenizer.json", texts, prompts) == expected


def test_long_prompts_are_counted_and_a_step_without_any_other_is_refused(model: Path):
    config = RolloutConfig(max_model_len=64, max_new_tokens=24)
    prompts = prompts_of("1 + 2?", "word " * 50, "3 + 4?", "word " * 60)
    assert too_long(config, str(model), prompts, [[0, 1], [2, 3]], "sums") == 2
    message = (
        r"sums: none of 2 prompts that are sampled together fits rollout.max_model_len \(64\) with 24 new tokens: .* and 2 of "
        r"all 4 are too long. Raise rollout.max_model_len, or .* dataset.max_prompt_tokens=40"
    )
    with pytest.raises(BadInput, match=message):
        too_long(config, str(model), prompts, [[0, 2], [1, 3]], "sums")


def test_what_is_short_in_bytes_needs_no_tokenizer(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.rollout.lengths.token_counts", None)
    assert too_long(RolloutConfig(max_model_len=512), str(model), prompts_of("1 + 2?"), [[0]], "sums") == 0
