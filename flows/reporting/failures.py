"""When a flow run does not end well: what to do is said, as an event and as a page; a crash loop is ended."""

from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.runtime import flow_run as this_flow_run

from environments import short_name
from flows.reporting import report
from infra.errors import BadInput, Corrupted, NonFiniteUpdate, NoRoom, OutOfMemory, Transient
from infra.orchestration.events import (
    DatasetFailed,
    EvaluationFailed,
    Failure,
    PublicationFailed,
    RunEvent,
    RunFailed,
    emit,
)
from infra.runs.run import Run
from infra.storage.store import Store
from tasks.dataset.config import DatasetConfig

MAX_STARTS = 5
"""Automatic starts of a flow run that commit nothing, after which it is not started again."""

DAMAGED = "A stored file is damaged. Delete that artifact's folder: the stage is then made again from its inputs."
NOT_FINITE = (
    "The same step would end the same way. Look at the metrics of the steps before, and start another run with a lower "
    "update.lr, or with update.correction where k3 grew."
)
AGAIN = "Start it again with the same parameters: what is in the store is not made again."
TRAIN_AGAIN = "Start the same run name again: it goes on from the last committed step."
RETRY = "by hand: retry the flow run, or start it again with the same parameters."
# A run keeps the settings that it was started with, its engines' included.
LARGER = "Take a larger machine: the engines have the settings that the run was started with."
SMALLER = (
    "Go on with this run on a larger machine, or start another one with a lower update.microbatch_tokens, "
    "rollout.max_model_len or rollout.kv_cache_gib."
)
CRASHED = "The process ended without a word: killed, out of memory, or its machine is gone."
RESUMED = "The automation `policyflow: resume crashed runs` starts it again;"


def advice(flow: str, state_name: str, error: Any) -> str:
    """What a person should do about a run of `flow` that ended in the state, with the exception (None: not known)."""
    training = flow == "train"
    again = TRAIN_AGAIN if training else AGAIN
    if state_name.startswith("Cancel"):
        return again
    if state_name == "Crashed":
        return f"{CRASHED} {RESUMED} {RETRY}" if training else f"{CRASHED} {again}"
    by_cause: list[tuple[type[BaseException], str]] = [
        (BadInput, f"Change what the message names; nothing was lost. {again}"),
        (Corrupted, DAMAGED),
        (NonFiniteUpdate, NOT_FINITE),
        (OutOfMemory, SMALLER if training else LARGER),
        (NoRoom, f"Make room where the message says. {again}"),
        (Transient, f"The store, the network or an engine kept failing: look at them first. {again}"),
    ]
    return next((text for kind, text in by_cause if isinstance(error, kind)), f"The log has the traceback. {again}")


def tell_failure(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A state hook: an event and a page on the flow run. It runs in the worker when the flow was killed."""
    end = "Cancelled" if state.is_cancelling() else state.name or ""  # the worker's hook runs before it is Cancelled
    error = state.result(raise_on_failure=False) if state.is_failed() else None
    reason = " ".join(str(error or state.message or end).split())[:1000]
    failure = failure_of(
        flow.name,
        flow_run.parameters,
        str(flow_run.id),
        state=end,
        reason=reason,
        advice=advice(flow.name, end, error),
    )
    emit(failure)
    key, title = page_of(failure, _run_id(failure) or str(flow_run.id)[:8])
    page = ArtifactCreate(
        key=key,
        type="markdown",
        flow_run_id=flow_run.id,
        description=f"Why {title} ended",
        data=report.failure_markdown(title, failure),
    )
    with get_client(sync_client=True) as client:
        client.create_artifact(page)


def failure_of(flow: str, parameters: dict[str, Any], flow_run_id: str, **what: str) -> Failure:
    """The event of a flow run of `flow` that ended; `what` holds its state, reason and advice."""
    if flow == "prepare":
        dataset = _settings(parameters, "dataset")
        environment = dataset.get("environment") or DatasetConfig().environment
        store = parameters.get("store") or "outputs/store"
        name = parameters.get("name") or short_name(environment)
        return DatasetFailed(name=name, environment=environment, store=store, **what)
    run, store = run_of(parameters, flow_run_id)
    if flow == "train":
        return RunFailed(run=run, store=store, step=_committed(run, store), **what)
    kind = EvaluationFailed if flow == "evaluate" else PublicationFailed
    return kind(run=run, store=store, version=_settings(parameters, "config").get("version"), **what)


def page_of(failure: Failure, which: str) -> tuple[str, str]:
    """(key, title) of the page about a failure: a key a kind, so that one flow's page does not hide another's. `which`: the
    run's id; else the flow run's."""
    _, name = failure.resource()
    words: dict[type[Failure], str] = {
        RunFailed: "Run",
        EvaluationFailed: "Evaluation of",
        PublicationFailed: "Publishing",
        DatasetFailed: "Dataset",
    }
    kind = "" if isinstance(failure, RunFailed) else f"-{failure.event.partition('.')[0]}"
    return f"{report.artifact_key(name, which)}{kind}-failure", f"{words[type(failure)]} {name}"


def run_of(parameters: dict[str, Any], flow_run_id: str) -> tuple[str, str]:
    """(run, store) that a flow run is about: a train run's name is made from the flow run's id where none is given."""
    config = _settings(parameters, "config")
    return config.get("run") or default_run(flow_run_id), config.get("store") or "outputs/store"


def default_run(flow_run_id: str) -> str:
    """The run's name where the parameters give none: a flow run that is started again finds its run."""
    return f"train-{flow_run_id[:8]}"


def end_crash_loop(run: Run, step: int) -> None:
    """Count this start. Raises BadInput when the flow run was started again and again without a step's progress."""
    if (this_flow_run.run_count or 1) <= 1:  # a person's start, not an automation's
        return
    before = run.read_json("restarts.json") or {}
    starts = before.get("starts", 0) + 1 if before.get("step") == step else 1
    if starts > MAX_STARTS:
        raise BadInput(
            f"run {run.name} was started {MAX_STARTS} times and crashed each time before step {step + 1} was committed; "
            "look at the log and at the machine's memory before you start it again"
        )
    run.write_json("restarts.json", {"step": step, "starts": starts})


def _run_id(failure: Failure) -> str | None:
    """Of the run that a failure is about; None: it has none, or nobody knows."""
    if not isinstance(failure, RunEvent):
        return None
    try:
        return Run(store=Store.at(failure.store).url, name=failure.run).known_id()
    except Exception:  # the store may be what failed
        return None


def _committed(run: str, store: str) -> int | None:
    """Steps that are committed; None: nothing is, or nobody knows."""
    try:
        head = Run(store=Store.at(store).url, name=run).head()
    except Exception:  # the store may be what failed
        return None
    return head.step if head else None


def _settings(parameters: dict[str, Any], name: str) -> dict[str, Any]:
    """A parameter as the server has it (JSON) or as the flow was called (a model); empty where there is none."""
    value = parameters.get(name) or {}
    return value if isinstance(value, dict) else value.model_dump()
