"""Chats with tools: all that a template can render is kept, tells prompts apart, and what is not understood is refused."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.errors import BadInput
from infra.runs.stages import Stage
from infra.storage.artifacts import open_artifact
from infra.storage.schemas import PROMPT, compact, validate
from tasks.dataset.config import DatasetConfig
from tasks.dataset.demonstrate import demonstrate
from tasks.dataset.prepare import Prepared, prepare
from tasks.dataset.task import content_digest, prepare_dataset

CHECKSUM = str(Path(__file__).resolve().parents[3] / "environments" / "checksum")
ASKED = {"role": "user", "content": "What is 2 + 2?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I had better add."}
REPLY = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c1"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def prepared(path: Path, *rows: dict[str, Any], **settings: Any) -> Prepared:
    path.write_text("".join(json.dumps({"answer": 4} | row) + "\n" for row in rows))
    return prepare(DatasetConfig(source="files", path=str(path), heldout_size=0, **settings))


def test_every_field_of_a_chat_and_its_tools_are_kept(tmp_path: Path):
    chat = [ASKED, CALLING, REPLY]
    (row,) = prepared(tmp_path / "a.jsonl", {"messages": chat, "tools": TOOLS}).train.to_pylist()
    assert json.loads(row["messages"]) == chat
    assert json.loads(row["tools"]) == TOOLS


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_every_format_gives_the_same_chat(tmp_path: Path, kind: str):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    bare = {"role": "assistant", "tool_calls": [call]}
    rows = [
        {"messages": [ASKED, bare, REPLY], "tools": TOOLS, "answer": 4},
        {"messages": [ASKED], "tools": None, "answer": 4},
    ]
    path = tmp_path / f"chats.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":  # every message has every field there, and every tool the parameters of all
        other = [{"type": "function", "function": {"name": "now", "strict": True}}]
        pq.write_table(pa.Table.from_pylist([*rows, {"messages": [REPLY], "tools": other, "answer": 4}]), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["messages", "tools", "answer"])
            writer.writeheader()
            for row in rows:
                offered = json.dumps(row["tools"]) if row["tools"] else ""
                writer.writerow({"messages": json.dumps(row["messages"]), "tools": offered, "answer": row["answer"]})
    table = prepare(DatasetConfig(source="files", path=str(path), heldout_size=0)).train
    found = {
        len(json.loads(row["messages"])): row for row in table.to_pylist() if row["messages"] != json.dumps([REPLY])
    }
    assert json.loads(found[3]["messages"]) == [ASKED, bare | {"content": None}, REPLY]
    assert json.loads(found[3]["tools"]) == TOOLS
    assert json.loads(found[1]["messages"]) == [ASKED]
    assert found[1]["tools"] is None


def test_prompts_that_differ_in_what_reaches_model_or_reward_are_two(tmp_path: Path):
    other = CALLING | {"tool_calls": [CALL | {"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]}
    rows = [
        {"messages": [ASKED]},
        {"messages": [ASKED], "tools": TOOLS},
        {"messages": [ASKED], "metadata": {"unit": "m"}},
        {"messages": [ASKED], "metadata": {"unit": "cm"}},
        {"messages": [ASKED | {"name": "Ann"}]},
        {"messages": [ASKED, CALLING, REPLY]},
        {"messages": [ASKED, other, REPLY]},
        {"messages": [ASKED, CALLING | {"reasoning_content": "Hm."}, REPLY]},
        {"messages": [ASKED, CALLING, REPLY | {"tool_call_id": "c2"}]},
    ]
    table = prepared(tmp_path / "a.jsonl", *rows, *rows).train
    assert len(set(table["prompt_id"].to_pylist())) == table.num_rows == len(rows)


def test_a_chat_that_is_held_out_is_not_trained_on_with_other_metadata(tmp_path: Path):
    rows = [{"prompt": f"{i % 4}?", "answer": 1, "metadata": {"unit": unit}} for i, unit in enumerate("abcdefgh")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = prepare(DatasetConfig(source="files", path=str(tmp_path / "a.jsonl"), heldout_size=2))
    seen = [set(table["messages"].to_pylist()) for table in (result.train, result.heldout)]
    assert not seen[0] & seen[1]


def test_ids_and_stored_bytes_of_prompts_without_tools_are_those_of_before(tmp_path: Path):
    default = prepare(DatasetConfig())
    assert default.train["prompt_id"][0].as_py() == "c1a048bf5ebb18ef4929c7511bbfc93c"
    old = "9464d292362e307ae6a850acb35ff1b68a9737052196c095af1443afc523eb34"
    assert content_digest(compact(default.train), compact(default.heldout)) == old
    system = {"role": "system", "content": "Be brief."}
    rows = [{"messages": [system, {"role": "user", "content": "Hi"}]}, {"text": "Once upon a time"}, {"prompt": "Hi"}]
    assert prepared(tmp_path / "a.jsonl", *rows).train["prompt_id"].to_pylist() == [
        "cb4d0dc141c9d08bd1ea0964c7cacc4f",
        "c5477e859d73a158b11a9e070f713aef",
        "779b5c6d83ca1888c5c4100b1330fd52",
    ]


def test_a_dataset_has_a_column_of_tools_where_there_are_some_and_is_read_with_and_without(tmp_path: Path):
    for tools in (None, TOOLS):
        prepared(tmp_path / "a.jsonl", {"messages": [ASKED], "tools": tools})
        config = DatasetConfig(source="files", path=str(tmp_path / "a.jsonl"), heldout_size=0)
        stage = Stage(store=f"file://{tmp_path}/store", folder="datasets", name="a", settings=config.digest())
        stored = open_artifact(prepare_dataset.fn(stage, config)).table("train")
        assert ("tools" in stored.column_names) is (tools is not None)
        (row,) = validate(stored, PROMPT).to_pylist()
        assert row["tools"] == (None if tools is None else json.dumps(tools))
        assert demonstrate(stored)["tools"].to_pylist() == [row["tools"]]


def test_arguments_as_text_are_the_object_that_templates_take(tmp_path: Path):
    calls = [{"function": {"name": "add", "arguments": text}} for text in ('{"a": 2}', "", None)]
    chat = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, REPLY]
    (row,) = prepared(tmp_path / "a.jsonl", {"messages": chat}).train.to_pylist()
    kept = json.loads(row["messages"])[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in kept] == [{"a": 2}, {}, {}]


ENVIRONMENT = """
class Tools:
    name = "tools"
    def reward(self, response, answer, metadata): return 0.0
    def problems(self, split, n, seed):
        from environments import Problem
        yield Problem(prompt=[{"role": "user", "content": split}], tools=[{"function": {"name": "add"}}])
    def solution(self, problem): return problem.tools[0]["function"]["name"]
def load_environment(): return Tools()
"""


def test_problems_of_an_environment_may_offer_tools(tmp_path: Path):
    (tmp_path / "tools.py").write_text(ENVIRONMENT)
    table = prepare(DatasetConfig(environment=str(tmp_path / "tools.py"))).train
    assert table["tools"].to_pylist() == ['[{"function": {"name": "add"}}]']
    assert demonstrate(table)["solution"].to_pylist() == ["add"]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "x"} | fields, ASKED]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            message(function_call={}),
            "message 1: the field 'function_call' is not understood in a message; besides role and",
        ),
        (message(role="user", tool_calls=[CALL]), "the field 'tool_calls' is not understood in a message of role user"),
        (message(tool_call_id="c1"), "the field 'tool_call_id' is not understood in a message of role assistant"),
        (message(reasoning_content=["x"]), "message 1, reasoning_content: a text is expected"),
        (message(tool_calls="add"), "message 1, tool_calls: a list of"),
        (message(tool_calls=[{"function": {}}]), "message 1, tool_calls: a list of"),
        (
            message(tool_calls=[{"function": {"name": "add", "arguments": "2 + 2"}}]),
            "message 1, tool_calls, arguments: a JSON object is expected, not '2 [+] 2'",
        ),
        (message(content=None), "message 1: a content that is a text and not empty is expected, not None"),
        (
            message(content=None, tool_calls=[]),
            "message 1: a content that is a text and not empty is expected, not None",
        ),
        ({"messages": [ASKED], "tools": ["add"]}, "column tools, tool 1: .* is expected, not 'add'"),
        ({"messages": [ASKED], "tools": "add"}, "column tools: a JSON list of functions is expected, not 'add'"),
        ({"text": "2 + 2", "tools": TOOLS}, "column tools: tools are offered in a chat, but the prompt is a text"),
        ({"messages": [ASKED], "functions": TOOLS}, "column functions: not understood; write them as tools"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, row: dict[str, Any], expected: str):
    with pytest.raises(BadInput, match=f"a.jsonl, row 1.*{expected}"):
        prepared(tmp_path / "a.jsonl", row, environment=CHECKSUM)


def test_nulls_of_json_in_a_parquet_file_are_nulls(tmp_path: Path):
    schemas = [{"name": "add", "parameters": {"default": None}}]
    row = {"messages": json.dumps([ASKED, CALLING, REPLY]), "tools": json.dumps(schemas), "answer": 4}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    table = prepare(DatasetConfig(source="files", path=str(tmp_path / "a.parquet"), heldout_size=0)).train
    assert json.loads(table["messages"][0].as_py())[1] == CALLING
    assert json.loads(table["tools"][0].as_py()) == schemas
