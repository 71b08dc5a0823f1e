"""MLflow gets every step once, whatever is resumed; its faults never reach the run, and take nothing with them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.orchestration.tracking import RUN_TAG, Tracker, flatten
from infra.storage.artifacts import ArtifactRef
from infra.storage.urls import local_path, sqlite_url

REF = ArtifactRef(kind="update", uri="file:///x", digest="blake3:" + "a" * 64)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose database every test shares, with an experiment of its own: MLflow takes seconds to make one."""
    folder = tmp_path_factory.mktemp("home") / "it's 1+1? 100%20 #ü"
    folder.mkdir()
    return folder


@pytest.fixture
def client(home: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(sqlite_url(home / "mlflow.db"))


@pytest.fixture
def experiment(request: pytest.FixtureRequest) -> str:
    return request.node.name


def tracker(
    home: Path, experiment: str, parameters: dict[str, Any] | None = None, uri: str | None = None, **settings
) -> Tracker:
    uri = uri or sqlite_url(home / "mlflow.db")
    return Tracker(uri, experiment, "run-1", "file:///it's", parameters or {"update": {"lr": 0.1}}, **settings)


def test_a_resumed_run_goes_on_in_its_mlflow_run_without_logging_a_step_twice(home: Path, client: Any, experiment: str):
    first = tracker(home, experiment)
    first.step(0, {"reward/mean": 0.25}, {"update": REF})
    first.step(1, {"reward/mean": 0.5}, {"update": REF})
    assert first.finish("KILLED") == []
    second = tracker(home, experiment)
    second.step(1, {"reward/mean": 0.5}, {"update": REF})
    second.step(2, {"reward/mean": 0.75}, {"update": REF})
    second.summary({"heldout_after": 0.9}, {"policy": REF}, picture=b"\x89PNG")
    assert second.finish("FINISHED") == []
    assert first.run_id == second.run_id is not None
    history = client.get_metric_history(second.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(0, 0.25), (1, 0.5), (2, 0.75)]
    run = client.get_run(second.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"update.lr": "0.1"}
    assert run.data.metrics["final/heldout_after"] == 0.9
    assert ArtifactRef.model_validate_json(run.data.tags["ref.policy"]) == REF
    assert (home / "mlartifacts" / first.run_id / "artifacts" / "reward.png").is_file()
    assert local_path(run.info.artifact_uri) != str(home / "mlartifacts" / first.run_id / "artifacts")  # it is quoted


def test_names_that_mlflow_does_not_take_are_spelled_for_it(home: Path, client: Any, experiment: str):
    weights = {"acc@1": 0.5, "format (strict)": 1.0, "": 2.0}
    run = tracker(home, experiment, {"reward": {"weights": weights}})
    run.step(0, {f"reward/part/{name}": value for name, value in weights.items()} | {"reward/mean": 1.5}, {})
    run.metrics(0, {"evaluation/my env (2)/heldout/accuracy": 0.5})
    assert run.finish("FINISHED") == []
    data = client.get_run(run.run_id).data
    assert data.metrics == {
        "reward/part/acc_x0040_1": 0.5,
        "reward/part/format _x0028_strict_x0029_": 1.0,
        "reward/part_x002F_": 2.0,
        "reward/mean": 1.5,
        "evaluation/my env _x0028_2_x0029_/heldout/accuracy": 0.5,
    }
    assert data.params["reward.weights.acc_x0040_1"] == "0.5"


def test_what_mlflow_refuses_is_told_by_name_and_the_rest_is_logged(
    home: Path, client: Any, experiment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    # As with a server that takes fewer names than this MLflow.
    monkeypatch.setattr("infra.orchestration.tracking.encode", lambda name: name)
    run = tracker(home, experiment, {"good": 1, "bad@": 2})
    for step in range(2):
        run.step(step, {"reward/mean": 1.0, "b@d": 2.0, "reward/std": 3.0}, {"update": REF})
    faults = run.finish("FINISHED")
    assert len(faults) == 2
    assert faults[0].startswith("param 'bad@' is not logged: ")
    assert faults[1].startswith("metric 'b@d' is not logged: ") and faults[1].endswith("(2 times)")
    assert capsys.readouterr().out.count("metric 'b@d' is not logged") == 1
    found = client.get_run(run.run_id)
    assert found.data.metrics == {"reward/mean": 1.0, "reward/std": 3.0}
    assert found.data.params == {"good": "1"}
    assert found.data.tags["policyflow.last_step"] == "1"
    assert found.info.status == "FINISHED"


def test_many_metrics_and_parameters_are_logged_in_batches(home: Path, client: Any, experiment: str):
    run = tracker(home, experiment, {f"p{i}": i for i in range(230)})
    run.step(0, {f"m{i}": float(i) for i in range(1200)}, {"update": REF})
    assert run.finish("FINISHED") == []
    data = client.get_run(run.run_id).data
    assert (len(data.params), len(data.metrics), data.metrics["m1199"]) == (230, 1200, 1199.0)


def test_a_deleted_experiment_stays_deleted_and_the_run_is_tracked_beside_it(
    home: Path, client: Any, experiment: str, capsys: pytest.CaptureFixture
):
    first = tracker(home, experiment)
    assert first.finish("FINISHED") == []
    client.delete_experiment(first.experiment_id)
    second, third = tracker(home, experiment), tracker(home, experiment)
    assert second.finish("FINISHED") == third.finish("FINISHED") == []
    assert client.get_experiment(second.experiment_id).name == f"{experiment}-2"
    assert third.experiment_id == second.experiment_id
    assert client.get_experiment(first.experiment_id).lifecycle_stage == "deleted"
    assert (
        f"experiment '{experiment}' was deleted there; this run is tracked in '{experiment}-2'"
        in capsys.readouterr().out
    )


def test_a_deleted_run_is_made_anew_and_said(home: Path, client: Any, experiment: str, capsys: pytest.CaptureFixture):
    first = tracker(home, experiment)
    first.step(0, {"reward/mean": 0.25}, {})
    first.finish("KILLED")
    client.delete_run(first.run_id)
    second = tracker(home, experiment)
    second.step(0, {"reward/mean": 0.25}, {})  # a resumed run tells its history again
    second.step(1, {"reward/mean": 0.5}, {})
    assert second.finish("FINISHED") == []
    assert f"MLflow: run {first.run_id} was deleted there; a new one is made" in capsys.readouterr().out
    assert [m.step for m in client.get_metric_history(second.run_id, "reward/mean")] == [0, 1]


def test_a_run_that_is_deleted_while_it_runs_is_told_of_once(
    home: Path, client: Any, experiment: str, capsys: pytest.CaptureFixture
):
    run = tracker(home, experiment)
    client.delete_run(run.opened())
    for step in range(3):
        run.step(step, {"reward/mean": 0.5, "reward/std": 0.1}, {})
    faults = run.finish("FINISHED")
    assert len(faults) == 1
    assert "deleted" in faults[0] and faults[0].endswith("(4 times)")  # each step, and the end
    assert capsys.readouterr().out.count("deleted") == 1


def test_who_only_visits_a_run_leaves_its_state_and_leaves_none_that_runs(home: Path, client: Any, experiment: str):
    visit = tracker(home, experiment, owns_status=False)
    assert visit.finish("KILLED") == []
    assert client.get_run(visit.run_id).info.status == "FINISHED"
    trainer = tracker(home, experiment)
    trainer.opened()
    assert tracker(home, experiment, owns_status=False).finish("FAILED") == []
    assert client.get_run(visit.run_id).info.status == "RUNNING"
    assert trainer.finish("KILLED") == []
    assert client.get_run(visit.run_id).info.status == "KILLED"


def test_processes_that_make_database_and_experiment_at_once_share_them(tmp_path: Path):
    code = (
        "import sys; from infra.orchestration.tracking import Tracker; t = Tracker(sys.argv[1], 'e', sys.argv[2], 'file:///s', {});"
        "print(t.finish('FINISHED', 200), t.experiment_id)"
    )
    command = [sys.executable, "-c", code, sqlite_url(tmp_path / "mlflow.db")]
    both = [subprocess.Popen([*command, f"run-{i}"], text=True, stdout=subprocess.PIPE) for i in range(2)]
    ends = [process.communicate(timeout=300)[0].splitlines()[-1] for process in both]
    assert ends == ["[] 1", "[] 1"]


def of_run(tmp_path, store: str, identity: str, resumed: bool = True) -> str | None:
    """The MLflow run of a start of `r` in a store."""
    one = Tracker(f"sqlite:///{tmp_path}/mlflow.db", "tests", "r", store, {}, identity=identity, resumed=resumed)
    assert one.finish("FINISHED") == []
    return one.run_id


def test_a_run_is_known_by_its_id_wherever_its_store_lies(tmp_path):
    first = of_run(tmp_path, "file:///data/store", "a", resumed=False)
    assert first is not None
    assert of_run(tmp_path, "file:///data/store", "b", resumed=False) != first, "another machine's, at the same path"
    assert of_run(tmp_path, "file:///moved", "a") == first
    assert of_run(tmp_path, "file:///data/store", "b") != first


def test_a_run_from_before_ids_goes_on_and_a_new_one_in_its_place_does_not(tmp_path):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.create_experiment("tests")
    before = client.create_run(experiment, tags={RUN_TAG: "file:///store::r"}).info.run_id
    assert of_run(tmp_path, "file:///store", "new", resumed=False) != before
    assert of_run(tmp_path, "file:///store", "old") == before
    assert of_run(tmp_path, "file:///moved", "old") == before


def test_a_database_that_cannot_be_is_said_at_once_and_not_raised(home: Path, capsys: pytest.CaptureFixture):
    broken = tracker(home, "e", uri="sqlite:////proc/nowhere/mlflow.db")
    assert broken.opened(timeout_s=30) is None
    assert "MLflow does not track this run" in capsys.readouterr().out
    broken.step(0, {"reward/mean": 0.25}, {})
    faults = broken.finish("FINISHED")
    assert len(faults) == 1
    assert "/proc/nowhere" in faults[0]


def test_flatten_names_settings_by_their_path():
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": {}}) == {"a.b": 1, "a.c.d": None, "e": {}}
