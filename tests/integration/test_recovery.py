"""Whatever is killed, and whenever: the run goes on and ends in the policy of an undisturbed run, bit for bit."""

import os
import random
import signal
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.artifacts import open_artifact
from infra.run import Run
from infra.s3_server import S3Server
from infra.store import Store
from tests.integration.pipeline import Pipeline, engine_pids
from tests.models import write_tiny_llama

FAST = "sync.verify_fresh=false"  # the undisturbed run has shown it


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("recovery")
    return Pipeline(folder, write_tiny_llama(folder / "model"))


@pytest.fixture(scope="module")
def undisturbed(pipeline: Pipeline) -> dict:
    output = pipeline.train("undisturbed")
    assert "run undisturbed is complete" in output
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
            ref = store.find(artifact)
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
        "reward_first", "reward_last", "heldout_before", "heldout_after", "steps", "seconds",
        "peak_rss_gib", "k3_mean", "overhead_share", "policy_digest",
    ):  # fmt: skip
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


def test_a_finished_run_started_again_tells_its_end_and_loads_nothing(pipeline: Pipeline, undisturbed: dict):
    output = pipeline.train("undisturbed")
    assert "run undisturbed is complete" in output
    assert "engines:" not in output
    assert pipeline.report("undisturbed")["seconds"] == undisturbed["seconds"]


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
    for step in range(4):
        for stage in ("rollout", "reward", "update"):
            assert f"{stage} {step}" in names
        page = artifacts[f"undisturbed-step-{step + 1:05d}"]
        assert "| prompt | response | reward | advantage |" in page
    assert "undisturbed-progress" in artifacts
    assert "undisturbed-report" in artifacts
    assert ("train undisturbed", "COMPLETED") in states


def test_mlflow_has_every_step_and_the_final_policy(pipeline: Pipeline, undisturbed: dict):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{pipeline.folder}/home/mlflow.db")
    experiment = client.get_experiment_by_name("policyflow")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "attributes.run_name = 'undisturbed'")
    assert len(runs) == 1
    history = client.get_metric_history(runs[0].info.run_id, "reward/mean")
    assert [metric.step for metric in history][:4] == [0, 1, 2, 3]
    assert "ref.policy" in runs[0].data.tags
