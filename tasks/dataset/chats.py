"""Chats of a source: messages and tools, checked field by field, so that what a template could render reaches it."""

import json
from dataclasses import replace
from typing import Any

from infra.errors import BadInput
from tasks.dataset.sources import Row

ROLES = ("system", "user", "assistant", "tool")
FIELDS = {
    "name": ROLES,
    "tool_calls": ("assistant",),
    "tool_call_id": ("tool",),
    "reasoning_content": ("assistant",),
    "reasoning": ("assistant",),
    "thinking": ("assistant",),
}
"""Fields of a message besides role and content, as chat templates know them -> roles that may have them."""
TOOLS = "tools"
"""Column of the functions that a chat offers."""
OTHERS = {"functions": "write them as tools", "chat_template_kwargs": "change the model's chat template"}
"""Columns that are meant for a chat template and do not reach it -> what to do instead."""


def messages_of(row: Row, column: str, value: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    """The messages of a row's prompt. Raises BadInput that names row, message and field."""
    where = f"{row.where}, column {column}"
    if isinstance(value, str) and column == "messages":  # CSV has no lists
        value, row = _parsed(value, where, "a JSON list of {role, content}"), replace(row, nulls_are_gaps=False)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise BadInput(f"{where}: a list of {{role, content}} that is not empty is expected, not {show(value)}")
    messages = [_message(f"{where}, message {number}", message, row) for number, message in enumerate(value, start=1)]
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadInput(
            f"{where}: the last message is of role {messages[-1]['role']}, but a prompt ends with user or tool; "
            "move the response into the answer column"
        )
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def tools_of(row: Row, *, is_chat: bool) -> list[dict[str, Any]] | None:
    """The column `tools`: functions as JSON schemas; None when there are none. Raises BadInput that names row and tool."""
    for column, instead in OTHERS.items():
        if row.values.get(column):
            raise BadInput(f"{row.where}, column {column}: not understood; {instead}, or take the column out")
    where = f"{row.where}, column {TOOLS}"
    value = row.values.get(TOOLS)
    if isinstance(value, str) and value.strip():
        value, row = _parsed(value, where, "a JSON list of functions"), replace(row, nulls_are_gaps=False)
    if value in (None, "", []):
        return None
    if not is_chat:
        raise BadInput(f"{where}: tools are offered in a chat, but the prompt is a text; give it as messages")
    if not isinstance(value, list):
        raise BadInput(f"{where}: a list of functions is expected, not {show(value)}")
    for number, tool in enumerate(value, start=1):
        if not _is_named(tool):
            raise BadInput(
                f'{where}, tool {number}: {{"type": "function", "function": {{"name": ...}}}} is expected, not {show(tool)}'
            )
    return _without_nulls(value) if row.nulls_are_gaps else value


def _message(where: str, message: Any, row: Row) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadInput(f"{where}: a role ({', '.join(ROLES)}) and a content are expected, not {show(message)}")
    role = message["role"]
    # A field that is null is one that the message has not: every row of a Parquet file has the fields of all.
    more = {key: value for key, value in message.items() if value is not None and key not in ("role", "content")}
    for key in more:
        if role not in FIELDS.get(key, ()):
            of = f" of role {role}" if key in FIELDS else ""
            raise BadInput(
                f"{where}: the field {key!r} is not understood in a message{of}; besides role and content there are: "
                + ", ".join(name for name, roles in FIELDS.items() if role in roles)
            )
    calls = _tool_calls(where, more.pop("tool_calls"), row) if more.get("tool_calls") else []
    more.pop("tool_calls", None)  # an empty list says nothing
    for key, value in more.items():
        if not isinstance(value, str):
            raise BadInput(f"{where}, {key}: a text is expected, not {show(value)}")
    content = message.get("content")
    if not (calls and content in (None, "")) and (not isinstance(content, str) or not content.strip()):
        raise BadInput(f"{where}: a content that is a text and not empty is expected, not {show(content)}")
    fields = more | ({"tool_calls": calls} if calls else {})
    return {"role": role, "content": content} | {key: fields[key] for key in FIELDS if key in fields}


def _tool_calls(where: str, calls: Any, row: Row) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(map(_is_named, calls)):
        raise BadInput(
            f'{where}, tool_calls: a list of {{"type": "function", "function": {{"name": ..., "arguments": {{...}}}}}} is '
            f"expected, not {show(calls)}"
        )
    checked = []
    for call in _without_nulls(calls) if row.nulls_are_gaps else calls:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        # Chat templates take an object; the servers' protocol writes it as its text.
        if isinstance(arguments, str):
            arguments = _parsed(arguments or "{}", f"{where}, tool_calls, arguments", "a JSON object")
        if not isinstance(arguments, dict | None):
            raise BadInput(f"{where}, tool_calls, arguments: a JSON object is expected, not {show(arguments)}")
        function |= {"arguments": arguments or {}}
        checked.append({**call, "function": function} if call.get("function") else function)
    return checked


def _is_named(function: Any) -> bool:
    """Whether it is {"function": {"name": ...}}, or the inner one alone."""
    inner = (function.get("function") or function) if isinstance(function, dict) else None
    return isinstance(inner, dict) and isinstance(inner.get("name"), str) and bool(inner["name"])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"{where}: {expected} is expected, not {show(text)}") from None


def show(value: Any) -> str:
    """A value in an error's message."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
