"""MLflow gets every step once, whatever is resumed, and its faults never reach the run."""

from infra.artifacts import ArtifactRef
from infra.tracking import Tracker, flatten

REF = ArtifactRef(kind="update", uri="file:///x", digest="blake3:" + "a" * 64)


def tracker(tmp_path, uri: str | None = None) -> Tracker:
    return Tracker(uri or f"sqlite:///{tmp_path}/mlflow.db", "tests", "run-1", "file:///store", {"update": {"lr": 0.1}})


def test_a_resumed_run_goes_on_in_its_mlflow_run_without_logging_a_step_twice(tmp_path):
    from mlflow import MlflowClient

    first = tracker(tmp_path)
    first.step(0, {"reward/mean": 0.25}, {"update": REF})
    first.step(1, {"reward/mean": 0.5}, {"update": REF})
    assert first.finish("KILLED") == []
    second = tracker(tmp_path)
    second.step(1, {"reward/mean": 0.5}, {"update": REF})
    second.step(2, {"reward/mean": 0.75}, {"update": REF})
    second.summary({"heldout_after": 0.9}, {"policy": REF}, picture=b"\x89PNG")
    assert second.finish("FINISHED") == []
    assert first.run_id == second.run_id is not None
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    history = client.get_metric_history(second.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(0, 0.25), (1, 0.5), (2, 0.75)]
    run = client.get_run(second.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"update.lr": "0.1"}
    assert ArtifactRef.model_validate_json(run.data.tags["ref.policy"]) == REF


def test_a_tracking_fault_is_reported_at_the_end_and_not_raised(tmp_path):
    broken = tracker(tmp_path, uri="sqlite:////proc/nowhere/mlflow.db")
    broken.step(0, {"reward/mean": 0.25}, {})
    assert broken.finish("FINISHED")


def test_flatten_names_settings_by_their_path():
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": {}}) == {"a.b": 1, "a.c.d": None, "e": {}}
