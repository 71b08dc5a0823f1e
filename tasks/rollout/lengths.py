"""Whether prompts fit the engine's context and its model, found before an engine is loaded.

Rendered and counted here without transformers, which costs the flow's process seconds and torch. The engine renders for
itself and has the last word (tasks/rollout/requests.py).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from infra.errors import BadInput
from infra.models.catalog import vocab_size
from infra.models.chat import begins_with, chat_of, unrendered, without_second_bos
from infra.models.vocabulary import first_foreign, foreign_fault, foreign_tokens
from tasks.rollout.config import RolloutConfig

if TYPE_CHECKING:
    import pyarrow as pa
    from jinja2 import Environment

SPECIAL = 4
"""Tokens that a tokenizer may put around a text, at most."""


def too_long(config: RolloutConfig, model: str, prompts: "pa.Table", calls: Iterable[list[int]], source: str) -> int:
    """How many of `prompts` (schema PROMPT) do not fit rollout.max_model_len with max_new_tokens more: the engine drops them.

    calls: row numbers of the prompts that the engine is given at a time. Raises BadInput when of one call none would be
    left, and for a prompt of a call that the engine would refuse: it has a token that the model has not, the chat template
    refuses it or would leave some of it out. 0 where it cannot be told here: no max_model_len is set, or the folder has no
    tokenizer.json.
    """
    folder = Path(model)
    found = rendered(folder, prompts)
    if found is None:
        return 0
    texts, faults = found
    foreign, limit = foreign_tokens(folder), None
    if config.max_model_len is not None and (folder / "tokenizer.json").is_file():
        limit = config.max_model_len - config.max_new_tokens
    # A token is a byte or more: short texts need no tokenizer.
    short = limit is None or all(len(text.encode()) + SPECIAL <= limit for text in texts)
    tokens = [] if short and not foreign else token_ids(folder, texts, prompts)
    long = {row for row, ids in enumerate(tokens) if limit is not None and len(ids) > limit}
    if foreign:
        faults |= _with_foreign(tokens, foreign, vocab_size(folder), long)
    for rows in calls if long or faults else ():
        if (row := next((row for row in rows if row in faults), None)) is not None:
            shown = texts[row] or prompts["messages"][row].as_py()
            raise BadInput(f"{source}, prompt {prompts['prompt_id'][row]} ({shown[:80]}): {faults[row]}")
        if long.issuperset(rows):
            raise BadInput(
                f"{source}: none of {len(rows)} prompts that are sampled together fits rollout.max_model_len "
                f"({config.max_model_len}) with {config.max_new_tokens} new tokens: the shortest has "
                f"{min(len(tokens[row]) for row in rows)}, and {len(long)} of all {len(tokens)} are too long. Raise "
                f"rollout.max_model_len, or have them dropped by dataset.max_prompt_tokens={limit}"
            )
    return len(long)


def _with_foreign(tokens: list[list[int]], foreign: dict[int, str], size: int, long: set[int]) -> dict[int, str]:
    """Rows with a token that the model has not, but for those that are dropped -> what is wrong."""
    faults = {}
    for row, ids in enumerate(tokens):
        if row not in long and (token := first_foreign(ids, size)) is not None:
            faults[row] = foreign_fault(token, foreign.get(token), size)
    return faults


def rendered(model: Path, prompts: "pa.Table") -> tuple[list[str], dict[int, str]] | None:
    """The prompts as the tokenizer gets them, messages by the chat template; and row -> why its chat cannot be ("" then).
    None for a template that needs more than jinja has."""
    from jinja2 import TemplateError

    settings = _settings(model)
    names = {name: _text(value) for name, value in settings.items() if name.endswith("_token")}
    path = model / "chat_template.jinja"
    written = path.read_text() if path.is_file() else settings.get("chat_template")
    rows = prompts.to_pylist()
    if not isinstance(written, str):
        return None if any(row["messages"] for row in rows) else ([row["text"] for row in rows], {})
    texts, faults = [row["text"] for row in rows], {}
    try:
        template = _environment().from_string(written)
        for number, row in enumerate(rows):
            if not row["messages"]:
                continue
            messages, tools = chat_of(row)
            if lost := unrendered(written, messages, tools):
                faults[number] = lost
                continue
            arguments = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
            try:
                texts[number] = template.render(**names | arguments)
            except _Refused as refusal:
                faults[number] = f"the model's chat template refuses it: {refusal}"
    except (TemplateError, TypeError, ValueError):
        return None
    return texts, faults


def token_ids(model: Path, texts: list[str], prompts: "pa.Table") -> list[list[int]]:
    """Tokens of each text, by the folder's tokenizer.json; what a chat template made has its special tokens already."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bos = _text(_settings(model).get("bos_token"))
    tokens = []
    for text, chat in zip(texts, prompts["messages"].to_pylist(), strict=True):
        ids = tokenizer.encode(text, add_special_tokens=not chat).ids
        if not chat and begins_with(text, bos):
            ids = without_second_bos(ids, tokenizer.encode(text, add_special_tokens=False).ids)
        tokens.append(ids)
    return tokens


class _Refused(Exception):
    """By the template's own `raise_exception`."""


def _environment() -> "Environment":
    """As transformers makes it, but for the statement and the clock that it adds."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: Any) -> NoReturn:
        raise _Refused(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse  # ty: ignore[invalid-assignment]
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )  # jinja's own is for HTML
    return environment


def _settings(model: Path) -> dict[str, Any]:
    return json.loads((model / "tokenizer_config.json").read_text())


def _text(token: Any) -> Any:
    """A special token is written as its text, or as an object with its text."""
    return token.get("content") if isinstance(token, dict) else token
