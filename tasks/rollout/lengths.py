"""Whether prompts fit the engine's context, found before an engine is loaded.

Rendered and counted here without transformers, which costs the flow's process seconds and torch. The engine renders for
itself and has the last word (tasks/rollout/requests.py).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import BadInput
from tasks.rollout.config import RolloutConfig

if TYPE_CHECKING:
    import pyarrow as pa

SPECIAL = 4
"""Tokens that a tokenizer may put around a text, at most."""


def too_long(config: RolloutConfig, model: str, prompts: "pa.Table", calls: Iterable[list[int]], source: str) -> int:
    """How many of `prompts` (schema PROMPT) do not fit rollout.max_model_len with max_new_tokens more: the engine drops them.

    calls: row numbers of the prompts that the engine is given at a time. Raises BadInput when of one call none would be
    left. 0 where it cannot be told here: no max_model_len is set, or the folder has no tokenizer.json.
    """
    tokenizer = Path(model) / "tokenizer.json"
    if config.max_model_len is None or not tokenizer.is_file():
        return 0
    limit = config.max_model_len - config.max_new_tokens
    texts = rendered(Path(model), prompts)
    # A token is a byte or more: short texts need no tokenizer.
    if texts is None or all(len(text.encode()) + SPECIAL <= limit for text in texts):
        return 0
    lengths = token_counts(tokenizer, texts, prompts)
    long = {row for row, length in enumerate(lengths) if length > limit}
    for rows in calls if long else ():
        if long.issuperset(rows):
            raise BadInput(
                f"{source}: none of {len(rows)} prompts that are sampled together fits rollout.max_model_len "
                f"({config.max_model_len}) with {config.max_new_tokens} new tokens: the shortest has "
                f"{min(lengths[row] for row in rows)}, and {len(long)} of all {len(lengths)} are too long. Raise "
                f"rollout.max_model_len, or have them dropped by dataset.max_prompt_tokens={limit}"
            )
    return len(long)


def rendered(model: Path, prompts: "pa.Table") -> list[str] | None:
    """The prompts as the tokenizer gets them, messages by the chat template. None for a template that needs more than
    jinja has."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    settings = json.loads((model / "tokenizer_config.json").read_text())
    path = model / "chat_template.jinja"
    source = path.read_text() if path.is_file() else settings.get("chat_template")
    names = {name: _text(value) for name, value in settings.items() if name.endswith("_token")}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    rows = prompts.to_pylist()
    try:
        template = environment.from_string(source) if isinstance(source, str) else None
        if template is None and any(row["messages"] for row in rows):
            return None
        return [
            template.render(messages=json.loads(row["messages"]), add_generation_prompt=True, **names)
            if template is not None and row["messages"]
            else row["text"]
            for row in rows
        ]
    except (TemplateError, TypeError, ValueError):
        return None


def token_counts(tokenizer: Path, texts: list[str], prompts: "pa.Table") -> list[int]:
    """Tokens of each text, by a tokenizer.json; what a chat template made has its special tokens already."""
    from tokenizers import Tokenizer

    counter = Tokenizer.from_file(str(tokenizer))
    counter.no_truncation()
    counter.no_padding()
    chats = prompts["messages"].to_pylist()
    return [len(counter.encode(text, add_special_tokens=not chat)) for text, chat in zip(texts, chats, strict=True)]


def _text(token: Any) -> Any:
    """A special token is written as its text, or as an object with its text."""
    return token.get("content") if isinstance(token, dict) else token
