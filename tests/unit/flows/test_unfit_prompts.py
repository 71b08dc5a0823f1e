"""Prompts and solutions that the model cannot take are told before any engine is loaded, whoever would sample or learn."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from flows import evaluate, train
from flows.config import TrainConfig
from infra.errors import BadInput
from infra.runs.run import Run
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef
from infra.storage.schemas import PROMPT
from infra.storage.store import Store
from tests.support.models import write_tiny_llama

ENVIRONMENT = """
class Echo:
    name = "echo"
    def reward(self, response, answer, metadata): return 1.0
    def solution(self, problem): return problem.answer
def load_environment(): return Echo()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer has a token that it has not: added, without a row in the embedding."""
    from transformers import AutoTokenizer

    folder = write_tiny_llama(tmp_path_factory.mktemp("llama"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> str:
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    return str(tmp_path / "echo.py")


def session_of(store: Store, model: Path, environment: str, **splits: list[tuple[str, str]]) -> tuple[Any, ArtifactRef]:
    """A session without engines, and a dataset of (text, answer) in each split."""
    config = TrainConfig.model_validate(
        {
            "run": "r",
            "store": store.url,
            "steps": 2,
            "warm_start": {"steps": 1},
            "dataset": {"environment": environment},
        }
    )
    stage = Stage(store=store.url, folder="datasets", name="d", settings="s")
    with stage.write("dataset", metadata={"prompts": {name: len(rows) for name, rows in splits.items()}}) as writer:
        for name, rows in splits.items():
            fields = {"environment": environment, "messages": "", "metadata": "{}"}
            given = [
                fields | {"prompt_id": f"{name}{number}", "text": text, "answer": json.dumps(answer)}
                for number, (text, answer) in enumerate(rows)
            ]
            writer.table(name, pa.Table.from_pylist(given, schema=PROMPT))
    run = Run(store=store.url, name="r")
    run.open(config.identity())
    run.pinned("dataset", lambda: writer.ref)
    return SimpleNamespace(config=config, run=run, model=str(model)), writer.ref


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_run_is_told_of_a_token_that_the_model_has_not_in_either_split(
    file_store: Store, model: Path, environment: str, split: str
):
    splits = {"train": [("a", "b")], "heldout": [("c", "d")]} | {split: [("a", "b"), ("use <tool>", "b")]}
    session, dataset = session_of(file_store, model, environment, **splits)
    message = rf"split {split}, prompt {split}1 \(use <tool>\): token '<tool>' \(id \d+\) is not one of the model's"
    with pytest.raises(BadInput, match=message):
        train.check_dataset_use(session, dataset)


def test_an_evaluation_is_told_too(file_store: Store, model: Path, environment: str):
    session, _ = session_of(file_store, model, environment, train=[("a", "b")], heldout=[("<tool>", "d")])
    version: Any = SimpleNamespace(run=session.run, number=0)
    with pytest.raises(BadInput, match="split heldout, prompt heldout0 .*: token '<tool>'"):
        evaluate.compare_versions(session, version, None, None)


def test_a_warm_start_is_told_of_a_solution_with_one(
    file_store: Store, model: Path, environment: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(train, "commit_demonstrations", train.commit_demonstrations.fn)
    session, dataset = session_of(
        file_store, model, environment, train=[("a", "b"), ("c", "<tool>")], heldout=[("e", "f")]
    )
    train.check_dataset_use(session, dataset)
    with pytest.raises(BadInput, match="warm_start: the solution of prompt train1 .*: token '<tool>'"):
        train.demonstrations_of(session, dataset)
