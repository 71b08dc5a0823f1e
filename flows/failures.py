"""When a training flow does not end well: what to do is said, as an event and as a page; a crash loop is ended."""

from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.runtime import flow_run as this_flow_run

from flows import report
from infra.errors import BadInput, Corrupted, OutOfMemory, Transient
from infra.events import RunFailed, emit
from infra.run import Run
from infra.store import Store

MAX_STARTS = 5
"""Automatic starts of a flow run that commit nothing, after which it is not started again."""

ADVICE: list[tuple[type[BaseException], str]] = [
    (BadInput, "Change what the message names. Nothing was lost; a run of this name goes on where it stands."),
    (
        Corrupted,
        "A stored file is damaged. Delete that artifact's folder: the stage is then made again from its inputs.",
    ),
    (
        OutOfMemory,
        "Lower update.microbatch_tokens, rollout.max_model_len or rollout.kv_cache_gib, or take a larger machine.",
    ),
    (Transient, "The store, the network or an engine kept failing. Look at them, then start the same run name again."),
]
OTHERWISE = "The log has the traceback. Start the same run name again: it goes on from the last committed step."
CRASHED = (
    "The process ended without a word: killed, out of memory, or its machine is gone. The automation `policyflow: resume "
    "crashed runs` starts it again; by hand: retry the flow run, or start the same run name."
)
CANCELLED = "Start the same run name to go on from the last committed step."


def advice(state_name: str, error: Any) -> str:
    """What a person should do about a flow run that ended in the state, with the exception (None: not known)."""
    if state_name.startswith("Cancel"):
        return CANCELLED
    if state_name == "Crashed":
        return CRASHED
    return next((text for kind, text in ADVICE if isinstance(error, kind)), OTHERWISE)


def tell_failure(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A state hook: the event `run.failed` and a page on the flow run. It runs in the worker when the flow was killed."""
    name, store = run_of(flow_run.parameters, str(flow_run.id))
    end = "Cancelled" if state.is_cancelling() else state.name or ""  # the worker's hook runs before it is Cancelled
    error = state.result(raise_on_failure=False) if state.is_failed() else None
    reason = " ".join(str(error or state.message or end).split())[:1000]
    what_to_do = advice(end, error)
    try:
        head = Run(store=Store.at(store).url, name=name).head()
    except Exception:  # the store may be what failed
        head = None
    step = head.step if head else None
    emit(RunFailed(run=name, store=store, state=end, reason=reason, advice=what_to_do, step=step))
    page = ArtifactCreate(
        key=f"{report.artifact_key(name)}-failure", type="markdown", flow_run_id=flow_run.id,
        description=f"Why {name} ended", data=report.failure_markdown(name, end, reason, what_to_do, step),
    )  # fmt: skip
    with get_client(sync_client=True) as client:
        client.create_artifact(page)


def run_of(parameters: dict[str, Any], flow_run_id: str) -> tuple[str, str]:
    """(run, store) that a train flow run is about: names are made from the flow run's id where none is given."""
    config = parameters.get("config") or {}
    config = config if isinstance(config, dict) else config.model_dump()
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
