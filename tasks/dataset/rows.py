"""One record of a source -> one checked prompt."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from environments import Environment
from environments.environment import ParsesAnswers
from infra.errors import BadInput
from tasks.dataset.config import DatasetConfig
from tasks.dataset.sources import Row

PROMPT_COLUMNS = ("messages", "prompt", "text")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """A row of the schema PROMPT, but for its environment."""

    prompt_id: str
    """128-bit hash (hex) of the prompt itself: equal prompts have equal ids, wherever they come from."""
    messages: str
    """JSON list of {role, content}; "" when `text` is used."""
    text: str
    answer: str
    """JSON."""
    metadata: str
    """JSON object."""


def parse_row(row: Row, config: DatasetConfig, environment: Environment) -> Prompt:
    """Check a row; the environment says what its answer stands for, if it knows.

    Raises BadInput that names the row, the column and what is expected of it.
    """
    column = _prompt_column(row, config)
    value = row.values[column]
    messages, text = "", ""
    if column == "text":
        if not isinstance(value, str) or not value.strip():
            raise BadInput(f"{row.where}, column text: a text that is not empty is expected, not {_show(value)}")
        _json(row, column, value)
        text = value
    else:
        messages = _json(row, column, _messages(row, column, value, config.system_prompt))
    identity = hashlib.sha256((messages or "text:" + text).encode()).hexdigest()[:32]
    answer = _json(row, *_answer(row, config, environment))
    return Prompt(identity, messages, text, answer, _json(row, "metadata", _metadata(row, config)))


def _prompt_column(row: Row, config: DatasetConfig) -> str:
    wanted = PROMPT_COLUMNS if config.prompt_column is None else (config.prompt_column,)
    for column in wanted:
        if row.values.get(column) is not None:
            return column
    raise BadInput(
        f"{row.where}: no prompt in column {' or '.join(wanted)}; "
        f"the columns are: {', '.join(map(str, row.values)) or 'none'} (dataset.prompt_column names the right one)"
    )


def _messages(row: Row, column: str, value: Any, system_prompt: str | None) -> list[dict[str, str]]:
    where = f"{row.where}, column {column}"
    if isinstance(value, str) and column == "messages":  # CSV has no lists
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise BadInput(f"{where}: a JSON list of {{role, content}} is expected, not {_show(value)}") from None
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise BadInput(f"{where}: a list of {{role, content}} that is not empty is expected, not {_show(value)}")
    messages = [_message(where, number, message) for number, message in enumerate(value, start=1)]
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadInput(
            f"{where}: the last message is of role {messages[-1]['role']}, but a prompt ends with user or tool; "
            "move the response into the answer column"
        )
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _message(where: str, number: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadInput(
            f"{where}, message {number}: a role ({', '.join(ROLES)}) and a content are expected, not {_show(message)}"
        )
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise BadInput(
            f"{where}, message {number}: a content that is a text and not empty is expected, not {_show(content)}"
        )
    return {"role": message["role"], "content": content}


def _answer(row: Row, config: DatasetConfig, environment: Environment) -> tuple[str, Any]:
    column = config.answer_column
    if column is not None and column not in row.values:
        raise BadInput(
            f"{row.where}: no column {column} (dataset.answer_column); the columns are: {', '.join(row.values)}"
        )
    column = column or "answer"
    answer = row.values.get(column)
    if not isinstance(environment, ParsesAnswers):
        return column, answer
    try:
        return column, environment.parse_answer(answer)
    except Exception as error:
        found = "there is none" if answer is None else f"not {_show(answer)}"
        raise BadInput(f"{row.where}, column {column}: {error or type(error).__name__}, {found}") from error


def _metadata(row: Row, config: DatasetConfig) -> dict[str, Any]:
    value = row.values.get("metadata") or {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            pass
    if not isinstance(value, dict):
        raise BadInput(f"{row.where}, column metadata: a JSON object is expected, not {_show(value)}")
    for column in config.metadata_columns:
        if column not in row.values:
            raise BadInput(
                f"{row.where}: no column {column} (dataset.metadata_columns); the columns are: {', '.join(row.values)}"
            )
        value = value | {column: row.values[column]}
    return value


def _json(row: Row, column: str, value: Any) -> str:
    try:
        # Sorted, so that equal values are equal strings; messages keep role before content, as people write them.
        text = json.dumps(value, sort_keys=not isinstance(value, list), ensure_ascii=False, allow_nan=False)
        text.encode()  # half of a surrogate pair is text to Python, and none in UTF-8
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"{row.where}, column {column}: a value that JSON can hold is expected ({error})") from None


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
