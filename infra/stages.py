"""What every stage's task has in common: one name a step, retries by cause, and no value but refs through Prefect."""

import functools
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.tasks import exponential_backoff

from infra.errors import BadInput, Lasting, OutOfMemory


def worth_a_retry(_task: Any, _task_run: Any, state: State[Any]) -> bool:
    """Bad input, damaged data, a failed comparison and an update that is no number stay what they are, what does not fit in
    memory must get smaller first (flows/memory.py); a lost engine or a fault of the network or the store may pass."""
    try:
        state.result()
    except (BadInput, Lasting, OutOfMemory):
        return False
    except Exception:
        return True
    return False


def stage_task(name: str, retries: int = 5) -> Any:
    """A Prefect task for a stage. Its first argument is the `Stage`, which names the task run.

    A retry waits 2, 4, 8, ... s, up to half as long again at random: a store that restarts is outwaited, and runs that it
    failed together do not come back together.

    Results are not persisted by Prefect: the stage's artifact is the result, and `Stage.committed` finds it again.
    """
    return functools.partial(
        task,
        name=name,
        task_run_name=name + " {stage.step}",
        retries=retries,
        retry_delay_seconds=exponential_backoff(backoff_factor=2),
        retry_jitter_factor=0.5,
        retry_condition_fn=worth_a_retry,
        cache_policy=NO_CACHE,
        persist_result=False,
        log_prints=False,
    )
