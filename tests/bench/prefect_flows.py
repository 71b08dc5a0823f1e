"""Flows that do on Prefect's side what a training run does, and nothing else: what bench_prefect measures."""

import json
import os
import time
from pathlib import Path

from prefect import flow, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

import flows.train  # noqa: F401  (a flow starts with its imports)
from infra.orchestration.events import PolicyCommitted, emit
from infra.orchestration.stage_task import stage_task
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef

STAGES = ("rollout", "reward", "update", "publish", "sync")
REF = ArtifactRef(kind="policy", uri="file:///nowhere", digest="blake3:00")


def nothing(stage: Stage) -> ArtifactRef:
    """A stage that is done at once."""
    return REF


TASKS = [stage_task(name)(nothing) for name in STAGES]


@flow(name="bench-steps", persist_result=False)
def steps(out: str, count: int = 30) -> None:
    """Seconds that Prefect adds to a step and to a task run, as the caller sees them, written to `out`."""
    stage = Stage(store="file:///nowhere", folder="runs/bench", name="x")
    progress = create_progress_artifact(progress=0.0, key="bench-progress")
    tasks, records = [], []
    for step in range(count):
        for run in TASKS:
            started = time.perf_counter()
            run(stage.model_copy(update={"step": step}))
            tasks.append(time.perf_counter() - started)
        started = time.perf_counter()
        create_markdown_artifact("x" * 2000, key=f"bench-step-{step:05d}")
        create_table_artifact([{"prompt": "p", "response": "r", "reward": 1.0}] * 8, key="bench-samples")
        update_progress_artifact(progress, progress=100 * step / count)
        emit(PolicyCommitted(run="bench", store="file:///nowhere", version=step, policy=REF, reward=0.5))
        records.append(time.perf_counter() - started)
    Path(out).write_text(json.dumps({"tasks": tasks, "records": records}))


@task
def first(out: str) -> float:
    """Leaves the time at which it started."""
    now = time.time()
    (Path(out) / f"{os.getpid()}.json").write_text(json.dumps(now))
    return now


@task
def second(value: float) -> float:
    """One more."""
    return value


@flow(name="bench-short", persist_result=False)
def short(out: str) -> None:
    """Three task runs."""
    second(second(first(out)))
