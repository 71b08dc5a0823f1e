"""One record of a source -> one checked prompt."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from environments import Environment
from environments.environment import ParsesAnswers
from environments.episodes.tools import own_tools
from infra.errors import BadInput
from tasks.dataset import chats
from tasks.dataset.chats import show
from tasks.dataset.config import DatasetConfig
from tasks.dataset.sources import Row

PROMPT_COLUMNS = ("messages", "prompt", "text")


@dataclass(frozen=True)
class Prompt:
    """A row of the schema PROMPT, but for its environment."""

    prompt_id: str
    """128-bit hash (hex) of all that reaches the model or, but for the answer, the reward: the chat or text, tools,
    metadata. Equal prompts have equal ids, wherever they come from."""
    messages: str
    """JSON list of {role, content, ...}; "" when `text` is used."""
    text: str
    answer: str
    """JSON."""
    metadata: str
    """JSON object."""
    tools: str | None = None
    """JSON list; None: there are none."""

    @property
    def seen(self) -> tuple[str, str, str | None]:
        """What the model sees of it."""
        return self.messages, self.text, self.tools


def parse_row(row: Row, config: DatasetConfig, environment: Environment) -> Prompt:
    """Check a row; the environment says what its answer stands for, if it knows.

    Raises BadInput that names the row, the column and what is expected of it.
    """
    column = _prompt_column(row, config)
    value = row.values[column]
    messages, text = "", ""
    if column == "text":
        if not isinstance(value, str) or not value.strip():
            raise BadInput(f"{row.where}, column text: a text that is not empty is expected, not {show(value)}")
        _json(row, column, value)
        text = value
    else:
        messages = _json(row, column, chats.messages_of(row, column, value, config.system_prompt))
    found = chats.tools_of(row, is_chat=bool(messages))
    if found is None and messages:
        found = own_tools(environment) or None
    tools = None if found is None else _json(row, chats.TOOLS, found)
    answer = _json(row, *_answer(row, config, environment))
    metadata = _json(row, "metadata", _metadata(row, config))
    return Prompt(_identity(messages, text, tools, metadata), messages, text, answer, metadata, tools)


def _identity(messages: str, text: str, tools: str | None, metadata: str) -> str:
    # Seeds and the order of prompts derive from ids, so those of prompts with nothing but a chat or a text stay for ever.
    whole = messages or "text:" + text
    if tools is not None or metadata != "{}":
        whole = json.dumps({"prompt": whole, "tools": tools, "metadata": metadata})
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


def _prompt_column(row: Row, config: DatasetConfig) -> str:
    wanted = PROMPT_COLUMNS if config.prompt_column is None else (config.prompt_column,)
    for column in wanted:
        if row.values.get(column) is not None:
            return column
    raise BadInput(
        f"{row.where}: no prompt in column {' or '.join(wanted)}; "
        f"the columns are: {', '.join(map(str, row.values)) or 'none'} (dataset.prompt_column names the right one)"
    )


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
        found = "there is none" if answer is None else f"not {show(answer)}"
        raise BadInput(f"{row.where}, column {column}: {error or type(error).__name__}, {found}") from error


def _metadata(row: Row, config: DatasetConfig) -> dict[str, Any]:
    value = row.values.get("metadata") or {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            pass
    if not isinstance(value, dict):
        raise BadInput(f"{row.where}, column metadata: a JSON object is expected, not {show(value)}")
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
