"""Which dataset a run is about, and what is said of one that it cannot use."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import __main__ as shell
from flows import prepare, train
from flows.config import PLACES, EvaluateConfig, TrainConfig
from flows.prepare import check_dataset
from flows.reporting import recorder
from flows.session import note_places
from flows.settings import PROFILES, load_config
from flows.versions import run_config
from infra.errors import BadInput
from infra.runs.run import Head, Run
from infra.storage.artifacts import ArtifactRef, open_artifact
from infra.storage.store import Store
from tasks.dataset.config import DatasetConfig
from tasks.reward.config import RewardConfig
from tasks.reward.task import check_reward
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
    monkeypatch.setattr("flows.reporting.recorder.tell_end", lambda *_: told.append("the end"))
    assert train.train.fn(config, dataset=ours)["complete"]
    assert told == ["run done was complete already: nothing is done; steps above 3 continue it", "the end"]
    with pytest.raises(BadInput, match="run 'done' trains on .*/ours, not on .*/theirs; choose another run name"):
        train.train.fn(config, dataset=theirs)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (3, "run done was complete already: nothing is done; steps above 3 continue it"),
        (
            2,
            "run done was complete already: nothing is done; it has 3 steps, more than steps=2, and none is taken back; "
            "steps above 3 continue it",
        ),
        (4, None),
    ],
)
def test_a_finished_run_says_what_more_and_fewer_steps_do(
    file_store: Store, monkeypatch: pytest.MonkeyPatch, steps: int, told: str | None
):
    run, lines = Run(store=file_store.url, name="done"), list[str]()
    run.write_json("report.json", {"complete": True, "steps": 3})
    config = TrainConfig(steps=steps)
    session: Any = SimpleNamespace(run=run, config=config, progress=SimpleNamespace(line=lines.append))
    monkeypatch.setattr(recorder, "tell_end", lambda *_: None)
    assert (recorder.finished_report(session) is None) == (told is None)
    assert lines == [told] * (told is not None)


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


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of problems and an environment; datasets are prepared in this process."""
    monkeypatch.setattr(prepare, "dataset_of", in_this_process)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/mine.py").write_text(
        "class Mine:\n"
        "    name = 'mine'\n"
        "    def reward(self, response, answer, metadata): return float(response == answer)\n"
        "def load_environment(): return Mine()\n"
    )
    (tmp_path / "here/sums.jsonl").write_text(
        '{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "2 + 2?", "answer": "4"}\n'
    )
    return tmp_path / "here"


def of(folder: Path) -> DatasetConfig:
    """The settings, with the problems in a folder."""
    return DatasetConfig(
        environment=str(folder / "mine.py"), source="files", path=str(folder / "sums.jsonl"), heldout_size=1
    )


def test_moved_problems_are_the_dataset_that_a_run_trains_on_and_changed_ones_are_refused(
    file_store: Store, problems: Path
):
    run = Run(store=file_store.url, name="r")
    run.open({"dataset": of(problems).model_dump()})
    began = prepare.run_dataset(run, of(problems), None, "", 60)
    for split in ("train", "heldout"):
        (row,) = open_artifact(began).table(split).to_pylist()
        assert re.fullmatch("mine.py@[0-9a-f]{32}", row["environment"]), "no row says where something lies"
    there = problems.rename(problems.parent / "there")
    assert prepare.run_dataset(run, of(there), None, "", 60) == began
    assert in_this_process(file_store.url, of(there)) == began, "it is the same to every other run, too"
    check_dataset(began, str(there / "mine.py"))
    (there / "sums.jsonl").write_text('{"prompt": "1 + 1?", "answer": "3"}\n{"prompt": "2 + 2?", "answer": "4"}\n')
    with pytest.raises(
        BadInput, match=rf"dataset\.path: what is at '{there}/sums.jsonl' is not what run 'r' trains on"
    ):
        prepare.run_dataset(run, of(there), None, "", 60)


@pytest.mark.parametrize("profile", sorted(path.stem for path in PROFILES.glob("*.yaml")))
def test_where_nothing_is_a_place_a_dataset_has_the_key_and_digest_that_it_always_had(profile: str):
    config = load_config(profile).dataset
    assert config.content() == config.digest()


def test_a_dataset_of_before_whose_rows_have_a_path_is_taken_by_who_names_that_path(file_store: Store, problems: Path):
    dataset = write_dataset(file_store, "before", f"{problems}/mine.py")
    check_dataset(dataset, str(problems / "mine.py"))
    check_reward(RewardConfig(), dataset, "train")
    copy = shutil.copy(problems / "mine.py", problems.parent / "mine.py")
    with pytest.raises(BadInput, match="is for environment .*/here/mine.py', these settings for 'mine.py@"):
        check_dataset(dataset, str(copy))


def test_what_a_visit_is_told_is_where_model_and_environment_are_now(file_store: Store, problems: Path):
    run = Run(store=file_store.url, name="r")
    config = TrainConfig(model="models/mine", dataset=of(problems))
    run.open(config.identity() | {"model_fingerprint": "f", "environment_digest": "e"}, PLACES)

    def places(**told: str) -> tuple[str, str]:
        found = run_config(EvaluateConfig(run="r", store=file_store.url, **told))
        return found.model, found.dataset.environment

    environment = f"{problems}/mine.py"
    assert places() == ("models/mine", environment)
    note_places(run, Path("/models/mine"), config)
    assert places() == ("/models/mine", environment)
    assert places(model="/m", environment="/e.py") == ("/m", "/e.py")


def in_this_process(store: str, config: DatasetConfig, model: str | None = None, _timeout_s: float = 0) -> ArtifactRef:
    """`dataset_of` without Prefect's server."""
    from infra.runs.stages import Stage
    from tasks.dataset.task import prepare_dataset

    stage = Stage(store=store, folder="datasets", name="d", settings=config.content())
    return prepare_dataset.fn(stage, config, model)


def test_a_run_of_more_steps_than_are_asked_for_keeps_what_is_committed(
    file_store: Store, monkeypatch: pytest.MonkeyPatch
):
    run, ref, lines, shares = Run(store=file_store.url, name="r"), write_dataset(file_store, "d", "addition"), [], []
    for name, made in (
        ("updates_of", lambda head: ()),
        ("create_progress_artifact", lambda progress, **_: shares.append(progress)),
    ):
        monkeypatch.setattr(recorder, name, made)
    session: Any = SimpleNamespace(
        run=run, config=TrainConfig(steps=2), pages="r", resumed=True, progress=SimpleNamespace(line=lines.append)
    )
    recorder.Recorder(session, ref, Head(step=3, update=ref, policy=ref))
    assert lines == [
        f"run r (resumed at step 3), 3 steps, store {file_store.url}",
        "steps=2: 3 are committed already, and none is taken back",
    ]
    assert shares == [100.0], "Prefect takes no more than 100%"


def test_a_resumed_run_tells_mlflow_its_history_by_the_numbers_that_it_was_recorded_under(
    file_store: Store, monkeypatch: pytest.MonkeyPatch
):
    run, ref, told = Run(store=file_store.url, name="r"), write_dataset(file_store, "d", "addition"), []
    committed = iter({"step": step, "metrics": {}, "refs": {}} for step in range(2))
    monkeypatch.setattr(recorder, "updates_of", lambda head: ["base", "first", "second"])
    monkeypatch.setattr(recorder, "committed_step", lambda update: next(committed))
    monkeypatch.setattr(recorder, "create_progress_artifact", lambda **_: None)
    session: Any = SimpleNamespace(
        run=run,
        config=TrainConfig(steps=4),
        pages="r",
        resumed=True,
        progress=SimpleNamespace(line=lambda text: None),
        tracker=SimpleNamespace(step=lambda step, metrics, refs: told.append(step)),
    )
    recorder.Recorder(session, ref, Head(step=2, update=ref, policy=ref))
    assert told == [1, 2], "as `record` numbers them: the first step is 1"
