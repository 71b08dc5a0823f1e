"""What every stage's task has in common: one name a step, retries by cause, and no value but refs through Prefect."""

from collections.abc import Callable
from typing import Any, cast

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.tasks import exponential_backoff

from infra.errors import BadInput, Lasting, OutOfMemory
from infra.runs.stages import Stage

IN_STEPS = ("rollout", "reward", "update")
"""Stages of a step; the others of a run are of a version."""


def worth_a_retry(_task: Any, _task_run: Any, state: State[Any]) -> bool:
    """Bad input, damaged data, a failed comparison and an update that is no number stay what they are, what does not fit in
    memory must get smaller first (flows/microbatch.py); a lost engine or a fault of the network or the store may pass."""
    try:
        state.result()
    except (BadInput, Lasting, OutOfMemory):
        return False
    except Exception:
        return True
    return False


def run_name(task_name: str, stage: Stage) -> str:
    """What Prefect calls a run of the task: steps count from 1, as everywhere that a person reads; version n is the policy
    after n steps. Tasks that a run has one of, and those of no run, have no number."""
    if stage.name in IN_STEPS:
        return f"{task_name}, step {stage.step + 1}"
    if stage.folder.startswith("runs/") and stage.name not in ("demonstrations", "base", "warm-start"):
        evaluation = "evaluation " if stage.name.startswith("evaluation-") else ""
        return f"{evaluation}{task_name}, version {stage.step}"
    return task_name


def stage_task[**P, R](name: str, retries: int = 5) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task for a stage. Its first argument is the `Stage`, which names the task run.

    A retry waits 2, 4, 8, ... s, up to half as long again at random: a store that restarts is outwaited, and runs that it
    failed together do not come back together.

    Results are not persisted by Prefect: the stage's artifact is the result, and `Stage.committed` finds it again.
    """

    def named(parameters: dict[str, Any]) -> str:
        return run_name(name, parameters["stage"])

    return task(
        name=name,
        task_run_name=cast(Any, named),  # a protocol of Prefect's that no function satisfies
        retries=retries,
        retry_delay_seconds=exponential_backoff(backoff_factor=2),
        retry_jitter_factor=0.5,
        retry_condition_fn=worth_a_retry,
        cache_policy=NO_CACHE,
        persist_result=False,
        log_prints=False,
    )
