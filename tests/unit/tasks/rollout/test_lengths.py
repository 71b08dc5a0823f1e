"""Prompts that do not fit the context: counted, and refused where a step would have none, before an engine is loaded."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from infra.errors import BadInput
from infra.models.catalog import prepare_model
from infra.models.chat import prompt_ids
from infra.storage.schemas import PROMPT
from tasks.rollout.config import RolloutConfig
from tasks.rollout.lengths import rendered, token_ids, too_long
from tests.support.models import write_tiny_llama


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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a BOS token that is put before texts, a template that writes it, and offers tools."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = write_tiny_llama(tmp_path_factory.mktemp("llama"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|pad|>"
    bos = [("<|pad|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|pad|> $A", special_tokens=bos)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


TEMPLATE = """{{ bos_token }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('a system message comes first') }}{% endif %}
    {{- '<|' + message.role + '|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}"""
TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é"}}])
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}


def rows_of(*chats: list[dict], tools: str | None = None) -> pa.Table:
    table = prompts_of(*map(str, range(len(chats))))
    columns = {"messages": [json.dumps(chat) for chat in chats], "tools": [tools] * len(chats)}
    for name, values in columns.items():
        table = table.set_column(PROMPT.names.index(name), PROMPT.field(name), pa.array(values, pa.string()))
    return table


def test_tools_calls_and_texts_with_a_bos_token_are_counted_as_the_engine_counts_them(llama: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama)
    chat = [{"role": "user", "content": "1 + 1?"}, CALL, {"role": "tool", "content": "2"}]
    chats, offered = rows_of(chat), rows_of(chat, tools=TOOLS)
    written = prompts_of(text="<|pad|><|user|>1 + 1?")
    for prompts in (chats, offered, written, prompts_of(text="1 + 1?"), prompts_of(text="<|pad|><|pad|>x")):
        texts, faults = rendered(llama, prompts) or ([], {})
        assert not faults
        assert token_ids(llama, texts, prompts) == [prompt_ids(tokenizer, row) for row in prompts.to_pylist()]
    assert "a < b & 'c' é" in tokenizer.decode(prompt_ids(tokenizer, offered.to_pylist()[0]))
    begin = tokenizer.bos_token_id
    for text, count in {"1": 1, "<|pad|>1": 1, "<|pad|><|pad|>1": 2}.items():
        assert prompt_ids(tokenizer, prompts_of(text=text).to_pylist()[0]).count(begin) == count


def test_a_chat_that_the_template_refuses_or_would_not_render_whole_is_named(llama: Path, model: Path):
    asked = {"role": "user", "content": "1 + 1?"}
    late = rows_of([asked], [asked, {"role": "system", "content": "Be brief."}, asked])
    config = RolloutConfig()
    assert too_long(config, str(llama), late, [[0]], "sums") == 0, "only what is sampled must be right"
    with pytest.raises(BadInput, match=r"sums, prompt 1 \(.*template refuses it: a system message comes first"):
        too_long(config, str(llama), late, [[0], [1]], "sums")
    lost = [
        (rows_of([asked], tools=TOOLS), "it has tools"),
        (rows_of([asked, CALL, asked]), "message 2 has tool_calls"),
    ]
    for prompts, what in lost:
        assert too_long(config, str(llama), prompts, [[0]], "sums") == 0
        with pytest.raises(BadInput, match=f"sums, prompt 0 .*{what}, which the model's chat template does not render"):
            too_long(config, str(model), prompts, [[0]], "sums")


def test_a_token_that_the_model_has_not_is_named_with_its_prompt_before_the_start(llama: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama)
    size = len(tokenizer)
    tokenizer.add_tokens(["<tool>"])
    shutil.copytree(llama, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = prompts_of("1 + 1?", "use a <tool>!", text="<tool>")
    for config in (RolloutConfig(), RolloutConfig(max_model_len=512)):
        assert too_long(config, str(tmp_path / "model"), prompts, [[0]], "sums") == 0
        for row in (1, 2):
            message = rf"sums, prompt {row} \(.*<tool>.*: token '<tool>' \(id {size}\) is not one of the model's {size}; resize"
            with pytest.raises(BadInput, match=message):
                too_long(config, str(tmp_path / "model"), prompts, [[0], [0, row]], "sums")


def test_tokens_are_counted_as_the_engine_counts_them(model: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = prompts_of("What is 3 + 4?", "say <|end|> \n ü " * 9, text="Once upon a time")
    texts, faults = rendered(model, prompts) or ([], {})
    assert not faults
    assert token_ids(model, texts, prompts) == [prompt_ids(tokenizer, row) for row in prompts.to_pylist()]


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
    monkeypatch.setattr("tasks.rollout.lengths.token_ids", None)
    assert too_long(RolloutConfig(max_model_len=512), str(model), prompts_of("1 + 2?"), [[0]], "sums") == 0
