"""Which dataset a run is about, and what is said of one that it cannot use."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from flows import __main__ as shell
from flows import prepare, train
from flows.config import TrainConfig
from infra.artifacts import ArtifactRef
from infra.errors import BadInput
from infra.run import Run
from infra.store import Store
from tasks.dataset.config import DatasetConfig
from tests.unit.test_security import write_dataset


def test_a_finished_run_started_with_another_dataset_is_told_so(file_store: Store, monkeypatch: pytest.MonkeyPatch):
    config = TrainConfig(run="done", store=file_store.url, steps=3)
    ours = write_dataset(file_store, "ours", "addition")
    theirs = write_dataset(file_store, "theirs", 'addition {"high": 99}')
    run = Run(store=file_store.url, name="done")
    run.open(config.identity())
    run.pinned("dataset", lambda: ours)
    run.write_json("report.json", {"complete": True, "steps": 3})

    @contextmanager
    def opened(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(run=run, config=config, model="m", progress=SimpleNamespace(line=told.append))

    told: list[Any] = []
    monkeypatch.setattr(train, "open_session", opened)
    monkeypatch.setattr("flows.recorder.tell_end", lambda *_: told.append("the end"))
    assert train.train.fn(config, dataset=ours)["complete"]
    assert told == ["run done was complete already: nothing is done; more steps continue it", "the end"]
    with pytest.raises(BadInput, match="run 'done' trains on .*/ours, not on .*/theirs; choose another run name"):
        train.train.fn(config, dataset=theirs)


def test_a_dataset_prepared_from_a_shell_gets_the_profiles_model_and_credentials(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(prepare, "prepare", lambda dataset, store, **others: given.update(others))
    shell.validated("prepare", ["smollm2-cpu", "model=some/folder", "credentials=keys"])()
    assert given == {"model": "some/folder", "credentials": "keys"}


def test_a_dataset_whose_answers_the_reward_cannot_use_is_refused_when_it_is_prepared(
    file_store: Store, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "strict.py").write_text(
        "class Strict:\n"
        "    name = 'strict'\n"
        "    def reward(self, response, answer, metadata): return float(response == answer.strip())\n"
        "def load_environment(): return Strict()\n"
    )
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "no answer"}\n')
    config = DatasetConfig(
        environment=str(tmp_path / "strict.py"), source="files", path=str(tmp_path / "sums.jsonl"), heldout_size=0
    )
    announced: list[ArtifactRef] = []
    monkeypatch.setattr(prepare, "announce", lambda ref, *_: announced.append(ref))
    monkeypatch.setattr(prepare, "dataset_of", in_this_process)
    with pytest.raises(
        BadInput, match=r"split train, prompt \d \(.*no answer.*no reward for the answer null: raised: Attri"
    ):
        prepare.prepare.fn(config, file_store.url)
    assert not announced


def in_this_process(store: str, config: DatasetConfig, model: str | None = None) -> ArtifactRef:
    """`dataset_of` without Prefect's server."""
    from infra.run import Stage
    from tasks.dataset.task import prepare_dataset

    return prepare_dataset.fn(Stage(store=store, folder="datasets", name="d"), config, model)
