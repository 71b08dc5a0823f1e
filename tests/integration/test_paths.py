"""Home, store, model, dataset and Prefect's database in a folder of any name: all lies there, and nothing elsewhere."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from infra.storage.urls import sqlite_url
from tests.support.models import write_tiny_llama
from tests.support.pipeline import Pipeline, quoted

pytestmark = pytest.mark.slow

NAME = "it's 1+1? #100%20 äü漢 ".ljust(190, "x")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("paths") / NAME
    folder.mkdir()
    (folder / "problems.jsonl").write_text(
        "".join(json.dumps({"prompt": str(i), "answer": i}) + "\n" for i in range(40))
    )
    return Pipeline(folder, write_tiny_llama(folder / "model"))


@pytest.fixture(scope="module")
def trained(pipeline: Pipeline) -> str:
    problems = quoted(str(pipeline.folder / "problems.jsonl"))
    return pipeline.train("r", "steps=2", "dataset.source=files", f"dataset.path={problems}")


def test_a_run_leaves_everything_in_its_folder(pipeline: Pipeline, trained: str):
    assert "run r is complete" in trained
    assert "MLflow missed" not in trained
    assert pipeline.report("r")["complete"]
    assert os.listdir(pipeline.folder.parent) == [NAME]
    assert sorted(os.listdir(pipeline.folder)) == sorted(
        ["home", "model", "prefect", "problems.jsonl", "store", "tiny.yaml"]
    )


def test_mlflow_has_the_run_and_its_files(pipeline: Pipeline, trained: str):
    from mlflow import MlflowClient

    client = MlflowClient(sqlite_url(pipeline.folder / "home" / "mlflow.db"))
    experiment = client.get_experiment_by_name("policyflow")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [1, 2]
    kept = pipeline.folder / "home" / "mlartifacts" / run.info.run_id / "artifacts"
    assert sorted(os.listdir(kept)) == ["refs", "reward.png"]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"refs", "reward.png"}


def test_prefect_has_the_flow_run_in_its_home(pipeline: Pipeline, trained: str):
    with sqlite3.connect(pipeline.folder / "prefect" / "prefect.db") as database:
        assert ("train r", "COMPLETED") in set(database.execute("select name, state_type from flow_run"))


def test_a_version_is_published_from_there(pipeline: Pipeline, trained: str):
    from mlflow import MlflowClient

    process = pipeline.popen(pipeline.flow("publish", "run=r", "name=tiny"))
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    uri = sqlite_url(pipeline.folder / "home" / "mlflow.db")
    source = MlflowClient(uri, uri).get_model_version_download_uri("tiny", "1")
    from mlflow.artifacts import download_artifacts

    files = {path.name for path in Path(download_artifacts(source)).iterdir()}
    assert {"config.json", "tokenizer.json"} <= files
    assert os.listdir(pipeline.folder.parent) == [NAME]
