"""When a run does not end well: a person is told what to do, and a crash loop ends."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from prefect import Flow
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Crashed, Failed

from flows import __main__ as shell
from flows.evaluate import evaluate
from flows.prepare import prepare
from flows.publish import publish
from flows.reporting import failures
from flows.reporting.failures import MAX_STARTS, advice, default_run, end_crash_loop, run_of, tell_failure
from flows.settings import load_config
from flows.train import collect_versions, train
from infra.engines.engine import EngineLost, is_out_of_memory
from infra.errors import BadInput, Corrupted, Mismatch, NonFiniteUpdate, OutOfMemory, Transient
from infra.orchestration.stage_task import worth_a_retry
from infra.runs.run import Head, Run
from infra.storage.artifacts import ArtifactRef
from tests.support.models import write_tiny_llama


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("Failed", BadInput("steps: wrong"), "Change what the message names"),
        ("Failed", Corrupted("x is damaged"), "Delete that artifact's folder"),
        ("Failed", OutOfMemory("no memory"), "a lower update.microbatch_tokens"),
        ("Failed", NonFiniteUpdate("step 3: loss nan"), "start another run with a lower update.lr"),
        ("Failed", EngineLost("died"), "look at them first. Start the same run name"),
        ("Failed", ZeroDivisionError(), "The log has the traceback"),
        ("Crashed", None, "The automation"),
        ("Cancelled", None, "goes on from the last committed step"),
    ],
)
def test_every_end_of_training_says_what_to_do(state: str, error: Exception | None, words: str):
    assert words in advice("train", state, error)


@pytest.mark.parametrize("flow", ["prepare", "evaluate", "publish"])
@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("Failed", BadInput("version: wrong"), "Change what the message names; nothing was lost. Start it again with"),
        ("Failed", Corrupted("x is damaged"), "Delete that artifact's folder"),
        ("Failed", OutOfMemory("no memory"), "Take a larger machine"),
        ("Failed", Transient("the store is away"), "look at them first. Start it again with the same parameters"),
        ("Failed", ZeroDivisionError(), "The log has the traceback. Start it again"),
        ("Crashed", None, "ended without a word: killed, out of memory, or its machine is gone. Start it again"),
        ("Cancelled", None, "what is in the store is not made again"),
    ],
)
def test_no_automation_starts_the_other_flows_again(flow: str, state: str, error: Exception | None, words: str):
    said = advice(flow, state, error)
    assert words in said
    assert "automation" not in said and "same run name" not in said


@pytest.fixture
def told(monkeypatch) -> list:
    """What `tell_failure` sends to the server, the events and the pages."""
    sent: list = []

    class Client:
        __enter__ = __exit__ = lambda self, *_: self

        def create_artifact(self, page) -> None:
            sent.append(page)

    monkeypatch.setattr(failures, "emit", sent.append)
    monkeypatch.setattr(failures, "get_client", lambda sync_client: Client())
    return sent


def tell(flow: Flow, parameters: dict, state) -> None:
    """As Prefect calls the flow's own hooks, with the parameters as the server has them."""
    ids = {"id": "0123abcd-0000-0000-0000-000000000000", "flow_id": "00000000-0000-0000-0000-000000000000"}
    flow_run = FlowRun.model_validate(ids | {"name": "tidy-fox", "parameters": parameters})
    assert flow.on_failure_hooks == flow.on_crashed_hooks == flow.on_cancellation_hooks == [tell_failure]
    tell_failure(flow=flow, flow_run=flow_run, state=state)


def test_a_failed_training_run_tells_how_far_it_came(told: list, tmp_path):
    run = Run(store=f"file://{tmp_path}", name="r1")
    ref = ArtifactRef(kind="policy", uri=f"file://{tmp_path}/p", digest="blake3:00")
    run.advance(None, Head(step=7, update=ref, policy=ref))
    run_id = run.id()
    tell(train, {"config": {"run": "r1", "store": str(tmp_path)}}, Failed(data=Corrupted("x.parquet is damaged")))
    event, page = told
    assert (event.event, event.resource()[0], event.step) == ("run.failed", "policyflow.run.r1", 7)
    assert (event.state, event.reason) == ("Failed", "x.parquet is damaged")
    assert page.key == f"r1-{run_id}-failure"
    assert page.data.startswith("# Run r1: Failed\n\nx.parquet is damaged\n\n**What to do:** A stored file")
    assert "7 steps are committed" in page.data


@pytest.mark.parametrize(
    ("flow", "event_name", "key", "title"),
    [
        (evaluate, "evaluation.failed", "r1-0123abcd-evaluation-failure", "# Evaluation of r1: Crashed"),
        (publish, "publication.failed", "r1-0123abcd-publication-failure", "# Publishing r1: Crashed"),
    ],
)
def test_an_evaluation_and_a_publication_tell_of_the_run(told: list, flow: Flow, event_name: str, key: str, title: str):
    tell(flow, {"config": {"run": "r1", "version": 3}}, Crashed(message="killed by signal 9"))
    event, page = told
    assert (event.event, *event.resource()) == (event_name, "policyflow.run.r1", "r1")
    assert (event.version, event.store, event.state) == (3, "outputs/store", "Crashed")
    assert event.reason == "killed by signal 9"
    assert page.key == key
    assert page.data.startswith(title)
    assert "committed" not in page.data


@pytest.mark.parametrize(
    ("parameters", "name", "environment"),
    [
        ({"dataset": {"environment": "my/envs/sums"}, "store": "s3://b/x"}, "sums", "my/envs/sums"),
        ({"dataset": {}, "store": "s3://b/x", "name": "nightly"}, "nightly", "addition"),
    ],
)
def test_a_preparation_tells_of_the_dataset(told: list, parameters: dict, name: str, environment: str):
    tell(prepare, parameters, Cancelling())
    event, page = told
    assert (event.event, *event.resource()) == ("dataset.failed", f"data.dataset.{name}", name)
    assert (event.environment, event.store, event.state) == (environment, "s3://b/x", "Cancelled")
    assert page.key == f"{name}-0123abcd-dataset-failure"
    assert page.data.startswith(f"# Dataset {name}: Cancelled")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Transient("the store is away"), True),
        (EngineLost("the actor died"), True),
        (ConnectionError("reset"), True),
        (BadInput("lr: must be positive"), False),
        (Corrupted("damaged"), False),
        (Mismatch("the engine holds another policy"), False),
        (NonFiniteUpdate("step 3: loss nan, gradient norm nan; nothing was applied"), False),
        (OutOfMemory("no memory"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, again: bool):
    assert worth_a_retry(None, None, Failed(data=error)) is again


def test_memory_faults_of_torch_and_python_are_known():
    import torch

    with pytest.raises(RuntimeError) as cpu:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(cpu.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_a_flow_run_without_a_run_name_finds_its_run_again():
    assert run_of({"config": {"steps": 3}}, "0123456789")[0] == default_run("0123456789") == "train-01234567"
    assert run_of({"config": {"run": "mine", "store": "s3://b/x"}}, "0123") == ("mine", "s3://b/x")


def test_a_crash_loop_without_progress_ends_and_progress_starts_the_count_anew(tmp_path, monkeypatch):
    run = Run(store=f"file://{tmp_path}", name="r")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "2")
    for _ in range(MAX_STARTS):
        end_crash_loop(run, step=3)
    end_crash_loop(run, step=4)
    for _ in range(MAX_STARTS - 1):
        end_crash_loop(run, step=4)
    with pytest.raises(BadInput, match=r"crashed each time before step 5"):
        end_crash_loop(run, step=4)


def test_a_persons_start_is_never_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "1")
    for _ in range(2 * MAX_STARTS):
        end_crash_loop(Run(store=f"file://{tmp_path}", name="r"), step=0)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadInput("steps: wrong"), 2),
        (Corrupted("x is damaged"), 1),
        (Mismatch("another policy"), 1),
        (NonFiniteUpdate("step 3: loss nan"), 1),
    ],
)
def test_a_shell_prints_one_line_of_a_fault_that_lasts(error: Exception, status: int, tmp_path, monkeypatch, capsys):
    def fail() -> None:
        raise error

    monkeypatch.setattr(shell, "validated", lambda name, settings: fail)
    monkeypatch.setattr(shell.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["flows", "train"])
    monkeypatch.setenv("POLICYFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")  # no server of others' is to be ended
    assert shell.main() == status
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_temporary_server_that_does_not_come_up_is_one_line(tmp_path):
    soon = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "1", "POLICYFLOW_HOME": str(tmp_path)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    model = f"model={write_tiny_llama(tmp_path / 'model')}"
    command = [sys.executable, "-m", "flows", "train", "smollm2-cpu", model, f"store={tmp_path}/store"]
    ended = subprocess.run(command, env=kept | soon, capture_output=True, text=True)
    assert ended.returncode == 1 and not (tmp_path / "store").exists()
    assert ended.stderr.startswith("error: Prefect's temporary server did not start within 1 s")
    assert ended.stderr.count("\n") == 1 and "PREFECT_API_URL" in ended.stderr


@pytest.mark.parametrize(
    "fault", [Transient("s3://b/x: SlowDown"), Corrupted("v3 is lost"), BadInput("access refused")]
)
def test_a_run_goes_on_where_old_versions_cannot_be_deleted(fault: Exception, monkeypatch: pytest.MonkeyPatch):
    lines, ref = list[str](), ArtifactRef(kind="policy", uri="file:///p", digest="blake3:00")
    session: Any = SimpleNamespace(
        run=None, config=load_config("smollm2-cpu"), progress=SimpleNamespace(line=lines.append)
    )
    monkeypatch.setattr("flows.train.drop_old_versions", mock.Mock(side_effect=fault))
    collect_versions(session, Head(step=1, update=ref, policy=ref))
    assert lines == [f"old versions stay in the store for now: {fault}"]
