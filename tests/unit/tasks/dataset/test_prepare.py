"""Sources -> prompt tables: what a user gets, and what is said to one whose data are wrong."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from environments import load_environment
from infra.errors import BadInput
from infra.storage.schemas import PROMPT, validate
from tasks.dataset.config import DatasetConfig
from tasks.dataset.prepare import prepare
from tasks.dataset.sources import read_split

CHECKSUM = str(Path(__file__).resolve().parents[3] / "environments" / "checksum")
"""An environment that takes answers as they come."""
PROBLEMS = [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(40)]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def torn_parquet() -> bytes:
    """A file whose footer is whole and whose data are not."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(PROBLEMS), sink, compression="zstd")
    data = bytearray(sink.getvalue())
    data[4:200] = bytes(196)
    return bytes(data)


def from_files(path: str, **settings: Any) -> DatasetConfig:
    return DatasetConfig(source="files", path=path, **settings)


def ids(table: pa.Table) -> list[str]:
    return table["prompt_id"].to_pylist()


def test_the_default_is_addition_with_64_train_and_17_heldout_prompts():
    prepared = prepare(DatasetConfig())
    assert (prepared.train.num_rows, prepared.heldout.num_rows) == (64, 17)
    assert not set(ids(prepared.train)) & set(ids(prepared.heldout))
    validate(prepared.train, PROMPT)
    row = prepared.train.to_pylist()[0]
    assert row["environment"] == "addition"
    assert json.loads(row["messages"])[0]["role"] == "user"


def test_the_environments_settings_travel_with_each_prompt():
    prepared = prepare(DatasetConfig(environment_args={"high": 3, "heldout": 2}))
    assert set(prepared.train["environment"].to_pylist()) == {'addition {"heldout": 2, "high": 3}'}


def test_the_seed_draws_the_order_but_not_who_is_held_out(tmp_path: Path):
    path = jsonl(tmp_path / "sums.jsonl", PROBLEMS)
    first, again, other = (prepare(from_files(path, seed=seed)) for seed in (0, 0, 1))
    assert first.train.equals(again.train)
    assert ids(first.train) != ids(other.train)
    assert sorted(ids(first.heldout)) == sorted(ids(other.heldout))


def test_the_order_of_the_rows_in_a_file_does_not_matter(tmp_path: Path):
    forward = prepare(from_files(jsonl(tmp_path / "a.jsonl", PROBLEMS)))
    backward = prepare(from_files(jsonl(tmp_path / "b.jsonl", PROBLEMS[::-1])))
    assert forward.train.equals(backward.train)
    assert forward.heldout.equals(backward.heldout)


def test_one_in_ten_is_held_out_unless_a_size_is_given(tmp_path: Path):
    path = jsonl(tmp_path / "sums.jsonl", PROBLEMS)
    assert prepare(from_files(path)).heldout.num_rows == 4
    prepared = prepare(from_files(path, heldout_size=15, train_size=20))
    assert (prepared.train.num_rows, prepared.heldout.num_rows) == (20, 15)
    assert prepare(from_files(path, heldout_size=0)).heldout.num_rows == 0


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet", "csv"])
def test_every_format_gives_the_same_prompts(tmp_path: Path, suffix: str):
    rows = [{"prompt": row["prompt"], "answer": str(row["answer"])} for row in PROBLEMS]
    path = tmp_path / f"sums.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        with fsspec.open(str(path), "wt", compression="infer") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    reference = prepare(from_files(jsonl(tmp_path / "reference.jsonl", rows)))
    assert prepare(from_files(str(path))).train.equals(reference.train)


def test_a_url_and_a_glob_are_read_like_a_file(tmp_path: Path):
    for part in range(2):
        with fsspec.open(f"memory://sums/{part}.jsonl", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in PROBLEMS[part::2])
    reference = prepare(from_files(jsonl(tmp_path / "reference.jsonl", PROBLEMS)))
    assert prepare(from_files("memory://sums/*.jsonl")).train.equals(reference.train)


@pytest.mark.parametrize("saved", [True, False])
def test_a_local_data_set_of_the_datasets_library_is_read(tmp_path: Path, saved: bool, monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sums"
    dataset = datasets.DatasetDict(
        train=datasets.Dataset.from_list(PROBLEMS[:30]), test=datasets.Dataset.from_list(PROBLEMS[30:])
    )
    if saved:
        dataset.save_to_disk(str(folder))
    else:
        for split, rows in dataset.items():
            rows.to_parquet(folder / f"{split}.parquet")
    prepared = prepare(DatasetConfig(source="datasets", path=str(folder), heldout_split="test"))
    assert (prepared.train.num_rows, prepared.heldout.num_rows) == (30, 10)
    with pytest.raises(BadInput, match="split 'validation'"):
        prepare(DatasetConfig(source="datasets", path=str(folder), split="validation"))


def test_messages_text_metadata_and_a_system_prompt(tmp_path: Path):
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "metadata": {"unit": "m"},
        "level": 3,
        "answer": {"b": 1, "a": None},
    }
    raw = {"text": "Once upon a time", "level": 1}
    path = jsonl(tmp_path / "mixed.jsonl", [chat, raw])
    config = from_files(
        path, environment=CHECKSUM, system_prompt="Be brief.", metadata_columns=["level"], heldout_size=0
    )
    by_text = {row["text"]: row for row in prepare(config).train.to_pylist()}
    assert json.loads(by_text[""]["messages"]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert json.loads(by_text[""]["answer"]) == {"a": None, "b": 1}
    assert json.loads(by_text[""]["metadata"]) == {"unit": "m", "level": 3}
    assert by_text["Once upon a time"]["messages"] == ""
    assert json.loads(by_text["Once upon a time"]["answer"]) is None


def test_columns_of_other_names_are_mapped(tmp_path: Path):
    path = jsonl(tmp_path / "gsm.jsonl", [{"question": "How many?", "solution": "3"}])
    columns = {"prompt_column": "question", "answer_column": "solution"}
    (row,) = prepare(from_files(path, environment=CHECKSUM, heldout_size=0, **columns)).train.to_pylist()
    assert json.loads(row["messages"]) == [{"role": "user", "content": "How many?"}]
    assert json.loads(row["answer"]) == "3"


def test_duplicates_and_prompts_of_both_splits_are_dropped_and_counted(tmp_path: Path):
    train = jsonl(tmp_path / "train.jsonl", [*PROBLEMS[:10], PROBLEMS[0]])
    heldout = jsonl(tmp_path / "heldout.jsonl", PROBLEMS[8:12])
    prepared = prepare(from_files(train, heldout_path=heldout))
    assert (prepared.train.num_rows, prepared.heldout.num_rows) == (8, 4)
    assert prepared.dropped == {"duplicate": 1, "also_heldout": 2, "too_long": 0}


def test_prompts_that_are_too_long_are_dropped_and_counted(tmp_path: Path):
    path = jsonl(tmp_path / "sums.jsonl", [{"prompt": "word " * n} for n in (1, 5, 500)])
    config = from_files(path, environment=CHECKSUM, max_prompt_tokens=10, heldout_size=0)
    prepared = prepare(config, tokenized_length=lambda prompt: len(json.loads(prompt.messages)[0]["content"].split()))
    assert prepared.train.num_rows == 2
    assert prepared.dropped["too_long"] == 1
    with pytest.raises(BadInput, match="max_prompt_tokens counts a model's tokens: name the model"):
        prepare(config)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl, row 2: not JSON"),
        ("[1]", "bad.jsonl, row 2: a JSON object is expected, not list"),
        (
            '{"question": "?", "id": 1}',
            "row 2: no prompt in column messages or prompt or text; the columns are: question, id",
        ),
        ('{"prompt": 3}', "row 2, column prompt: a list of {role, content}"),
        ('{"prompt": ""}', "row 2, column prompt, message 1: a content that is a text and not empty"),
        ('{"text": " "}', "row 2, column text: a text that is not empty"),
        ('{"messages": []}', "row 2, column messages: a list"),
        (
            '{"messages": [{"role": "bot", "content": "x"}]}',
            r"row 2, column messages, message 1: a role \(system, user",
        ),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "message 1: a content that is a text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "a prompt ends with user or tool"),
        ('{"prompt": "x", "answer": 1, "metadata": 3}', "row 2, column metadata: a JSON object"),
        ('{"prompt": "x", "answer": NaN}', "row 2, column answer: a finite number is expected, not nan"),
        ('{"prompt": "x", "answer": "many"}', "row 2, column answer: a number is expected, not 'many'"),
        ('{"prompt": "x"}', "row 2, column answer: a number is expected, there is none"),
        ('{"prompt": "x", "answer": 1, "metadata": {"a": NaN}}', "row 2, column metadata: a value that JSON can hold"),
        (r'{"prompt": "\ud800", "answer": 1}', "row 2, column prompt: a value that JSON can hold .*surrogates"),
        (r'{"text": "\ud800", "answer": 1}', "row 2, column text: a value that JSON can hold .*surrogates"),
        ('{"prompt": "x", "answer": ' + "1" * 5000 + "}", "row 2: not JSON .*digits"),
        ("[" * 100_000, "row 2: not JSON"),
        ('{"prompt": "good", "answer": 2}', "row 2: the same prompt occurs above with another answer"),
    ],
)
def test_a_malformed_row_is_named_with_file_row_column_and_what_is_expected(tmp_path: Path, line: str, message: str):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "good", "answer": 1}\n' + line + "\n")
    with pytest.raises(BadInput, match=message):
        prepare(from_files(str(tmp_path / "bad.jsonl")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "no train prompts are left"),
        ("empty.csv", b"prompt,answer\n", "no train prompts are left"),
        ("short.csv", b"prompt,answer\nx\n", "short.csv, row 1: expected 2 columns"),
        ("broken.parquet", b"PAR1", "broken.parquet: not a Parquet file"),
        ("torn.parquet", torn_parquet(), "torn.parquet is damaged .*; copy or write it again"),
        ("torn.jsonl.gz", gzip.compress(b'{"prompt": "x", "answer": 1}\n' * 99)[:-9], "torn.jsonl.gz is damaged"),
        ("no.jsonl.gz", b'{"prompt": "x", "answer": 1}\n', "no.jsonl.gz is damaged .Not a gzipped file"),
        ("torn.jsonl.bz2", b"BZh9 and then no more of it", "torn.jsonl.bz2 is damaged"),
        ("torn.jsonl.xz", b"\xfd7zXZ\0 and then no more", "torn.jsonl.xz is damaged"),
        ("sums.xlsx", b"", "the format is told by the suffix, one of: .jsonl"),
    ],
)
def test_an_empty_or_unreadable_file_is_named(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        prepare(from_files(str(tmp_path / name)))


@pytest.mark.parametrize("path", ["missing.jsonl", "missing/*.jsonl", "nowhere://x.jsonl", "folder.jsonl"])
def test_a_path_that_leads_nowhere_is_named(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(BadInput, match="dataset.path"):
        prepare(from_files(path))


def test_holding_out_everything_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="all 40 prompts are held out"):
        prepare(from_files(jsonl(tmp_path / "sums.jsonl", PROBLEMS), heldout_size=40))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "x.jsonl"}, "source is environment"),
        ({"source": "files"}, "path is missing"),
        ({"source": "datasets", "path": "x", "heldout_path": "y"}, "heldout_split"),
        ({"source": "files", "path": "x", "heldout_split": "y"}, "heldout_path"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DatasetConfig(**settings)


def test_a_number_of_a_csv_is_the_number(tmp_path: Path):
    (tmp_path / "sums.csv").write_text("prompt,answer\nWhat is 5 + 7?,12\nWhat is 1 / 2?, 0.5\n")
    table = prepare(from_files(str(tmp_path / "sums.csv"), heldout_size=0)).train
    assert sorted(json.loads(row["answer"]) for row in table.to_pylist()) == [0.5, 12]
    (tmp_path / "sums.csv").write_text("prompt,answer\nWhat is 5 + 7?,\n")
    with pytest.raises(BadInput, match="sums.csv, row 1, column answer: a number is expected, not ''"):
        prepare(from_files(str(tmp_path / "sums.csv"), heldout_size=0))


def test_a_bucket_without_credentials_is_bad_input_and_a_lost_connection_is_not(monkeypatch: pytest.MonkeyPatch):
    from botocore.exceptions import NoCredentialsError

    def refuse(error: Exception) -> Any:
        def open_files(*_: Any, **__: Any) -> Any:
            raise error

        return open_files

    config = from_files("s3://bucket/train.jsonl")
    monkeypatch.setattr(fsspec, "open_files", refuse(NoCredentialsError()))
    with pytest.raises(BadInput, match="s3://bucket/train.jsonl: access refused .*AWS_ACCESS_KEY_ID"):
        prepare(config)
    monkeypatch.setattr(fsspec, "open_files", refuse(PermissionError("Forbidden")))
    with pytest.raises(BadInput, match="access refused"):
        prepare(config)
    monkeypatch.setattr(fsspec, "open_files", refuse(ConnectionResetError("reset by peer")))
    with pytest.raises(ConnectionResetError):
        prepare(config)


def test_a_damaged_file_of_a_data_set_of_the_datasets_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "train.parquet").write_bytes(torn_parquet())
    with pytest.raises(BadInput, match="dataset.path .*sums"):
        prepare(DatasetConfig(source="datasets", path=str(tmp_path / "sums")))


def test_problems_that_raise_are_the_environments_fault(tmp_path: Path):
    (tmp_path / "broken.py").write_text(
        "class Broken:\n"
        "    name = 'broken'\n"
        "    def reward(self, response, answer, metadata): return 0.0\n"
        "    def problems(self, split, n, seed): yield 1 // 0\n"
        "def load_environment(): return Broken()\n"
    )
    message = "broken.py': problems\\(\\) of split train failed: ZeroDivisionError: "
    with pytest.raises(BadInput, match=message):
        prepare(DatasetConfig(environment=str(tmp_path / "broken.py")))


@pytest.mark.parametrize("name", ["a b", "a#b", "a%20b", "a?b", "a+b", "äü漢", "a[b]c", "a*b", "x" * 200])
@pytest.mark.parametrize("source", ["files", "datasets"])
def test_a_folder_of_any_name_is_read_and_no_other_that_its_name_would_match(
    tmp_path: Path, source: Literal["files", "datasets"], name: str
):
    for folder, answer in ((name, "mine"), ("axxb", "theirs"), ("a1b", "theirs"), ("abc", "theirs")):
        (tmp_path / folder).mkdir()
        jsonl(tmp_path / folder / "train.jsonl", [{"prompt": folder, "answer": answer}] * 3)
    given = {"files": ["train.jsonl", "*.jsonl"], "datasets": [""]}[source]
    for path in given:
        config = DatasetConfig(source=source, path=str(tmp_path / name / path))
        rows = read_split(config, load_environment("addition"), "train")
        assert rows is not None
        assert [row.values["answer"] for row in rows] == ["mine"] * 3
