"""Whatever is killed, and whenever: the run goes on and ends in the policy of an undisturbed run, bit for bit."""

import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest

from infra.runs.run import Run
from infra.storage.artifacts import find_artifact, open_artifact
from infra.storage.s3_server import S3Server
from infra.storage.store import Store
from tests.support.models import write_tiny_llama
from tests.support.pipeline import REPO, Pipeline, engine_pids

FAST = "sync.verify_fresh=false"  # the undisturbed run has shown it


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("recovery")
    return Pipeline(folder, write_tiny_llama(folder / "model"))


@pytest.fixture(scope="module")
def undisturbed(pipeline: Pipeline) -> dict:
    output = pipeline.train("undisturbed")
    assert "run undisturbed is complete" in output
    (pipeline.folder / "undisturbed.txt").write_text(output)
    return pipeline.report("undisturbed")


def committed(folder: Path, run: str) -> dict[str, str]:
    """Every rollout, reward and update artifact of a run: key -> digest with provenance's creation time."""
    store = Store.at(str(folder / "store"))
    keys = store.keys(f"runs/{run}/steps")
    found = {}
    for key in keys:
        parts = key.split("/")
        if parts[-1] == "manifest.json" and parts[-2].split("-")[0] in {"rollout", "reward", "update"}:
            artifact = "/".join(parts[:-1])
            ref = find_artifact(store, artifact)
            assert ref is not None
            found[artifact] = f"{ref.digest} {open_artifact(ref).manifest.provenance['created']}"
    return found


class Reader(threading.Thread):
    """Collects a process's output while it runs."""

    def __init__(self, process):
        super().__init__(daemon=True)
        self.process, self.output = process, ""
        self.start()

    def run(self) -> None:
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, text: str, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < deadline, f"no {text!r} within {timeout_s} s:\n{self.output}"
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output}"
            time.sleep(0.05)


def test_an_undisturbed_run_reports_what_a_person_asks_for(pipeline: Pipeline, undisturbed: dict):
    for name in (
        "reward_first",
        "reward_last",
        "heldout_before",
        "heldout_after",
        "steps",
        "seconds",
        "peak_rss_gib",
        "k3_mean",
        "overhead_share",
        "policy_digest",
    ):
        assert undisturbed[name] is not None, name
    assert undisturbed["steps"] == 4
    assert undisturbed["k3_mean"] < 1e-3
    picture = (pipeline.folder / "store" / "runs" / "undisturbed" / "reward.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_killed_engines_are_replaced_within_the_run(pipeline: Pipeline, undisturbed: dict):
    process = pipeline.start("killed-engines", FAST)
    reader = Reader(process)
    reader.wait_for("step   1/4")
    time.sleep(random.uniform(0, 0.5))
    os.kill(engine_pids(reader.output)["vllm"], signal.SIGKILL)
    reader.wait_for("step   2/4")
    time.sleep(random.uniform(0, 0.5))
    os.kill(engine_pids(reader.output)["megatron"], signal.SIGKILL)
    assert process.wait(timeout=400) == 0, reader.output
    assert pipeline.report("killed-engines")["policy_digest"] == undisturbed["policy_digest"]


def test_a_killed_and_an_interrupted_flow_resume_with_the_same_command(pipeline: Pipeline, undisturbed: dict):
    process = pipeline.start("killed-flow", FAST)
    reader = Reader(process)
    reader.wait_for("step   1/4")
    time.sleep(random.uniform(0, 0.5))
    process.kill()
    process.wait()
    after_kill = committed(pipeline.folder, "killed-flow")
    assert after_kill, "nothing was committed before the kill"

    process = pipeline.start("killed-flow", FAST)
    reader = Reader(process)
    reader.wait_for("resumed at step")
    time.sleep(random.uniform(0, 0.5))
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 130, reader.output
    reader.join(10)
    assert "the same command goes on from the last committed step" in reader.output
    after_interrupt = committed(pipeline.folder, "killed-flow")
    assert after_kill.items() <= after_interrupt.items(), "a committed artifact was made again"

    pipeline.train("killed-flow", FAST)
    assert after_interrupt.items() <= committed(pipeline.folder, "killed-flow").items()
    assert pipeline.report("killed-flow")["policy_digest"] == undisturbed["policy_digest"]


def test_a_run_with_other_settings_is_refused_and_named(pipeline: Pipeline, undisturbed: dict):
    output = pipeline.train("undisturbed", "update.lr=0.5", expect=2)
    assert "update.lr: the run has 0.001, this start asks for 0.5" in output


@pytest.mark.slow
def test_a_run_whose_store_model_and_environment_have_moved_goes_on(
    pipeline: Pipeline, undisturbed: dict, tmp_path: Path
):
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(pipeline.model, here / "model")
    shutil.copytree(REPO / "tests/environments/checksum", here / "environment")
    begun = replace(pipeline, model=here / "model", store=str(here / "store"))
    begun.train("moved", FAST, "steps=2", f"dataset.environment={here}/environment")
    assert_says_nothing_of(here, here / "store")
    here.rename(there)
    (there / "environment").rename(there / "called otherwise")
    moved = replace(pipeline, model=there / "model", store=str(there / "store"))
    environment = f"dataset.environment='{there}/called otherwise'"
    assert "resumed at step 2" in moved.train("moved", FAST, environment)
    run = Run(store=f"file://{there}/store", name="moved")
    assert (run.read_json("report.json") or {})["policy_digest"] == undisturbed["policy_digest"]
    assert not here.exists(), "nothing was looked for, or put, where things had been"

    (there / "called otherwise" / "__init__.py").open("a").write("# changed\n")
    refused = moved.train("moved", FAST, "steps=5", environment, expect=2)
    assert (
        f"dataset.environment: '{there}/called otherwise' is not what the run has, at '{here}/environment'" in refused
    )
    (there / "model" / "config.json").open("a").write("\n")
    refused = moved.train("moved", FAST, "steps=5", environment, expect=2)
    assert f"model: '{there}/model' is not what the run has, at '{here}/model'" in refused


def assert_says_nothing_of(place: Path, store: Path) -> None:
    """No artifact of the store has a path below the place; of the run's own files only those that are about places."""
    files = [path for path in store.rglob("*") if path.is_file() and str(place).encode() in path.read_bytes()]
    assert {path.name for path in files} == {"id.json", "places.json", "run.json"}
    for path in (store / "datasets").rglob("train.parquet"):
        assert "/" not in "".join(pyarrow.parquet.read_table(path)["environment"].to_pylist())


def test_a_finished_run_started_again_tells_its_end_and_loads_nothing(pipeline: Pipeline, undisturbed: dict):
    output = pipeline.train("undisturbed")
    assert "run undisturbed is complete" in output
    assert "engines:" not in output
    assert pipeline.report("undisturbed")["seconds"] == undisturbed["seconds"]


@pytest.mark.slow
def test_more_steps_continue_a_finished_run_and_nothing_is_done_twice(pipeline: Pipeline, undisturbed: dict):
    before = committed(pipeline.folder, "undisturbed")
    output = pipeline.train("undisturbed", "steps=5")
    assert "resumed at step 4" in output
    assert before.items() <= committed(pipeline.folder, "undisturbed").items()
    assert pipeline.report("undisturbed")["steps"] == 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=no/such/folder"], "neither a folder nor a model of the catalog"),
        (["update.learning_rate=1"], "update.learning_rate: unknown setting"),
        # The dataset's own task finds this one, and must not try it again.
        (["dataset.source=files", "dataset.path=/no/such/problems.jsonl"], "/no/such/problems.jsonl"),
        (["evaluation.split=test"], "no prompts in split 'test'; it has {'heldout': "),
        (["reward.weights.style=2"], "reward.weights: the environment's reward has no part 'style'"),
        (["resources.slots=nobody-made-it"], "no global concurrency limit 'nobody-made-it'"),
    ],
)
def test_bad_input_ends_with_one_error_before_an_engine_starts(pipeline: Pipeline, overrides: list[str], message: str):
    output = pipeline.train("refused", *overrides, expect=2)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in output
    assert "engines:" not in output


def test_a_whole_run_on_s3_ends_in_the_same_policy(pipeline: Pipeline, undisturbed: dict, s3_server: S3Server):
    s3_server.create_bucket("runs")
    remote = replace(pipeline, store="s3://runs/store", environment=s3_server.environment)
    remote.train("remote", FAST)
    report = Run(store="s3://runs/store", name="remote").read_json("report.json")
    assert report is not None
    assert report["policy_digest"] == undisturbed["policy_digest"]
    assert Store.at("s3://runs/store").keys("runs/remote/checkpoints")


def test_prefect_shows_one_task_run_a_stage_and_step_and_a_page_a_step(pipeline: Pipeline, undisturbed: dict):
    with sqlite3.connect(f"file:{pipeline.folder}/prefect/prefect.db?mode=ro", uri=True) as database:
        names = [name for (name,) in database.execute("select name from task_run")]
        artifacts = dict(database.execute("select key, data from artifact where key like 'undisturbed%'"))
        states = set(database.execute("select name, state_type from flow_run"))
    pages = f"undisturbed-{Run(store=f'file://{pipeline.folder}/store', name='undisturbed').id()}"
    for step in range(1, 5):
        assert {f"{task}, step {step}" for task in ("rollout", "reward", "update")} <= set(names)
        assert {f"{task}, version {step}" for task in ("commit", "sync")} <= set(names)
        page = artifacts[f"{pages}-step-{step:05d}"]
        assert "| prompt | response | reward | advantage |" in page
    assert {"evaluation rollout, version 0", "evaluation reward, version 4"} <= set(names)
    assert f"{pages}-progress" in artifacts
    assert f"{pages}-report" in artifacts
    assert ("train undisturbed", "COMPLETED") in states


def test_prefects_log_has_the_lines_of_the_terminal_which_shows_them_once(pipeline: Pipeline, undisturbed: dict):
    with sqlite3.connect(f"file:{pipeline.folder}/prefect/prefect.db?mode=ro", uri=True) as database:
        logged = [line for (line,) in database.execute("select message from log where level = 20")]
    printed = (pipeline.folder / "undisturbed.txt").read_text().splitlines()
    for begin in (
        "engines: vLLM",
        "run undisturbed (new), 4 steps",
        "step   1/4",
        "run undisturbed is complete: 4 steps",
    ):
        (line,) = [line for line in printed if begin in line]
        assert line in logged
    assert not any("Finished in state" in line for line in printed), "Prefect's own lines are for its log"


def test_mlflow_has_every_step_and_the_final_policy(pipeline: Pipeline, undisturbed: dict):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{pipeline.folder}/home/mlflow.db")
    experiment = client.get_experiment_by_name("policyflow")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "attributes.run_name = 'undisturbed'")
    assert len(runs) == 1
    history = client.get_metric_history(runs[0].info.run_id, "reward/mean")
    assert [metric.step for metric in history][:4] == [1, 2, 3, 4]
    assert "ref.policy" in runs[0].data.tags
