"""What a Prefect server must have before the deployments are made: `python -m infra.orchestration.workspace`.

Work pools with their job templates, concurrency limits, and the automations that end silent runs and resume crashed
ones. It can be run again at any time, against the server of PREFECT_API_URL; what a person has changed in a limit stays.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

INFRA = Path(__file__).parents[1]
POOLS = {"local": "process", "docker": "docker", "kubernetes": "kubernetes"}
"""Work pool -> type of its workers. infra/pools has the job templates; `local` has its worker's own."""
QUEUES = {"interactive": 1, "default": 2, "scheduled": 3}
"""Work queue -> priority: what a person waits for comes before what the clock started."""
LIMITS = {"machine": 1, "gpus": 8}
"""Global concurrency limit -> slots: pipelines with engines on this machine, GPUs of the cluster."""


def apply(say: Callable[[str], Any] = print) -> None:
    """Make or update everything, and say what there is."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        for name, kind in POOLS.items():
            _pool(client, name, kind)
        for name, slots in LIMITS.items():
            _limit(client, name, slots)
        automations = yaml.safe_load((INFRA / "orchestration" / "automations.yaml").read_text())
        for values in automations:
            _automation(client, values)
    say(f"work pools: {', '.join(POOLS)} (queues {', '.join(QUEUES)})")
    say(f"concurrency limits: {', '.join(f'{name} {slots}' for name, slots in LIMITS.items())}")
    say(f"automations: {', '.join(values['name'] for values in automations)}")


def job_template(name: str) -> dict[str, Any]:
    """The base job template of a pool; of `local`, the process worker's own with heartbeats switched on."""
    path = INFRA / "pools" / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text())
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    template["variables"]["properties"]["env"]["default"] = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    return template


def _pool(client: "SyncPrefectClient", name: str, kind: str) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    template = job_template(name)
    try:
        client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=template))
    except ObjectAlreadyExists:
        client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
    for queue, priority in QUEUES.items():
        try:
            found = client.read_work_queue_by_name(queue, work_pool_name=name)
            client.update_work_queue(found.id, priority=priority)
        except ObjectNotFound:
            client.create_work_queue(queue, priority=priority, work_pool_name=name)


def _limit(client: "SyncPrefectClient", name: str, slots: int) -> None:
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.exceptions import ObjectNotFound

    try:
        client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=slots))


def _automation(client: "SyncPrefectClient", values: dict[str, Any]) -> None:
    from prefect.events.schemas.automations import AutomationCore

    automation = AutomationCore.model_validate(values)
    found = client.read_automations_by_name(automation.name)
    if found:
        client.update_automation(found[0].id, automation)
    else:
        client.create_automation(automation)


if __name__ == "__main__":
    apply()
