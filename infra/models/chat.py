"""A prompt as the model gets it, for everyone who counts, samples or learns: the tokens of a chat, or of a text."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from infra.errors import BadInput

type Messages = list[Any]
type Tools = list[dict[str, Any]] | None

RENDERED = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that say something of their own: a template must render them. (Many leave out `name` and
`tool_call_id`, which only tell who speaks and which call is answered.)"""


def chat_of(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """(messages, tools) of a row of schema PROMPT or DEMONSTRATION that is a chat; tools is None when there are none."""
    tools = row.get("tools")
    return json.loads(row["messages"]), json.loads(tools) if tools else None


def prompt_ids(tokenizer: Any, row: Mapping[str, Any]) -> list[int]:
    """Token ids of a row's prompt: its text, or its chat by the chat template. BadInput names the prompt that has none."""
    name = f"prompt {row['prompt_id']!r}"
    try:
        if row["text"] or not row["messages"]:
            ids = text_ids(tokenizer, row["text"])
        else:
            messages, tools = chat_of(row)
            if lost := unrendered(_template(tokenizer, tools), messages, tools):
                raise BadInput(f"{name}: {lost}")
            ids = tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
            )
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{name}: cannot be rendered: {error}") from error
    if not ids:
        raise BadInput(f"{name}: has no tokens")
    return list(ids)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text. One that brings its BOS token along, as a chat template writes it, gets no second one."""
    ids = list(tokenizer(text)["input_ids"])
    if not begins_with(text, getattr(tokenizer, "bos_token", None)):
        return ids
    return without_second_bos(ids, list(tokenizer(text, add_special_tokens=False)["input_ids"]))


def begins_with(text: str, bos: str | None) -> bool:
    """Whether a text brings its BOS token along."""
    return bool(bos) and text.startswith(bos)


def without_second_bos(ids: list[int], plain: list[int]) -> list[int]:
    """`ids` of a text that begins with BOS (`begins_with`), less the one that the tokenizer put before it, if it did.

    plain: the text's ids without special tokens added. What a tokenizer appends stays.
    """
    doubled = len(ids) > len(plain) and ids[0] == plain[0] and ids[1 : len(plain) + 1] == plain
    return ids[1:] if doubled else ids


def unrendered(template: str | None, messages: Messages, tools: Tools) -> str | None:
    """What of a chat its template would leave out, as a sentence; None when nothing, or when it cannot be told."""
    if template is None:
        return None
    known = _names(template)
    hint = "take it out of the dataset, or use a model whose template has it"
    if tools and "tools" not in known:
        return f"it has tools, which the model's chat template does not render; {hint}"
    for number, message in enumerate(messages, start=1):
        for field in RENDERED:
            if message.get(field) and field not in known:
                return f"message {number} has {field}, which the model's chat template does not render; {hint}"
    return None


@lru_cache(maxsize=8)
def _names(template: str) -> frozenset[str]:
    """Names, attributes and keys in a template's code; not the words of the text around it."""
    from jinja2 import Environment, TemplateSyntaxError, nodes

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:  # statements of transformers' own
        return frozenset(re.findall(r"\w+", template))
    found = {node.name for node in tree.find_all(nodes.Name)} | {node.attr for node in tree.find_all(nodes.Getattr)}
    return frozenset(found | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)})


def _template(tokenizer: Any, tools: Tools) -> str | None:
    """The tokenizer's template for such a chat; None for a tokenizer that renders without one."""
    chosen = getattr(tokenizer, "get_chat_template", None)
    if chosen is None or getattr(tokenizer, "chat_template", None) is None:
        return None
    return chosen(tools=tools)
