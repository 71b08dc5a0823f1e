"""What Prefect costs on this machine, server and worker beside the flows: time, memory, and twenty flow runs at once."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.orchestration.server import LocalPrefect
from tests.bench import harness, ours

PORT = 4277
AT_ONCE = 20
MODULE = "tests.bench.prefect_flows"


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        started = time.perf_counter()
        with LocalPrefect(Path(folder) / "prefect", PORT) as prefect:
            ready_s = time.perf_counter() - started
            with temporary_settings({PREFECT_API_URL: prefect.api_url}), get_client(sync_client=True) as client:
                _deploy(prefect, Path(folder))
                figures = {"server_ready_s": ready_s, **_overhead(client, Path(folder))}
                figures |= _event(client, Path(folder)) | _memory(prefect, "") | _at_once(client, Path(folder))
                figures |= _memory(prefect, "_after")
    step_s = _step_seconds()
    return figures | {"quickstart_step_s": step_s, "share_of_a_step": figures["prefect_a_step_s"] / step_s}


def _deploy(prefect: LocalPrefect, folder: Path) -> None:
    pool = {"name": "local", "work_queue_name": "default"}
    (folder / "short").mkdir()
    (folder / "event").mkdir()
    trigger = {
        "type": "event",
        "match": {"prefect.resource.id": "bench"},
        "expect": ["bench.go"],
        "parameters": {"out": f"{folder}/event"},
    }
    deployments = [
        {"name": "bench", "entrypoint": f"{MODULE}:steps", "work_pool": pool},
        {"name": "bench", "entrypoint": f"{MODULE}:short", "work_pool": pool, "triggers": [trigger]},
    ]
    file = folder / "bench.yaml"
    file.write_text(yaml.safe_dump({"name": "bench", "deployments": deployments}))
    prefect.deploy(file)


def _overhead(client: SyncPrefectClient, folder: Path) -> dict[str, float]:
    out = folder / "steps.json"
    _wait(client, [_start(client, "bench-steps/bench", out=str(out))])
    seconds = json.loads(out.read_text())
    task, records = statistics.median(seconds["tasks"]), statistics.median(seconds["records"])
    return {"task_run_ms": 1000 * task, "records_a_step_ms": 1000 * records, "prefect_a_step_s": 5 * task + records}


def _event(client: SyncPrefectClient, folder: Path) -> dict[str, float]:
    waits = []
    for number in range(1, 4):
        emitted = time.time()
        emit_event(event="bench.go", resource={"prefect.resource.id": "bench"})
        _until(lambda n=number: len(list((folder / "event").iterdir())) >= n)
        times = [json.loads(path.read_text()) for path in (folder / "event").iterdir()]
        waits.append(max(times) - emitted)
        _until(lambda: not _running(client))
    return {"event_to_first_task_s": statistics.median(waits), "event_to_first_task_max_s": max(waits)}


def _at_once(client: SyncPrefectClient, folder: Path) -> dict[str, float]:
    started = time.perf_counter()
    runs = [_start(client, "bench-short/bench", out=str(folder / "short")) for _ in range(AT_ONCE)]
    states = _wait(client, runs)
    seconds = time.perf_counter() - started
    body = {"task_runs": {"flow_run_id": {"any_": [str(run) for run in runs]}}}
    with suppress(TimeoutError):  # the server counts a task run a moment after it has ended
        _until(lambda: client.request("POST", "/task_runs/count", json=body).json() == 3 * AT_ONCE, 60)
    completed = sum(state == "COMPLETED" for state in states)
    return {
        "at_once_runs": AT_ONCE,
        "at_once_failed": AT_ONCE - completed,
        "at_once_lost_task_runs": 3 * AT_ONCE - client.request("POST", "/task_runs/count", json=body).json(),
        "at_once_s": seconds,
    }


def _memory(prefect: LocalPrefect, when: str) -> dict[str, float]:
    """Resident memory in MiB of server and worker, without the flow runs that the worker has started."""
    found = {}
    for name, process in prefect.processes.items():
        root = psutil.Process(process.pid)
        found[f"{name}_rss_mib{when}"] = sum(_rss(one) for one in (root, *root.children(recursive=True))) / 2**20
    return found


def _rss(process: psutil.Process) -> int:
    try:
        return 0 if "PREFECT__FLOW_RUN_ID" in process.environ() else process.memory_info().rss
    except psutil.Error:  # a flow run that has just ended
        return 0


def _step_seconds() -> float:
    """Of the quickstart: from the bench `overhead`, where it has been run here; else of three steps now."""
    result = harness.RESULTS / "overhead.json"
    if result.exists():
        return json.loads(result.read_text())["figures"]["step_s"]
    return ours.train("smollm2-cpu", "steps=3", "sync.verify_fresh=false")["step_seconds"]


def _start(client: SyncPrefectClient, deployment: str, **parameters: Any) -> UUID:
    found = client.read_deployment_by_name(deployment)
    return client.create_flow_run_from_deployment(found.id, parameters=parameters).id


def _running(client: SyncPrefectClient) -> bool:
    states = ["RUNNING", "PENDING"]
    body = {"flow_runs": {"state": {"type": {"any_": states}}}}
    return client.request("POST", "/flow_runs/count", json=body).json() > 0


def _wait(client: SyncPrefectClient, runs: list[UUID]) -> list[str]:
    def states() -> list[str]:
        found = [client.read_flow_run(run).state for run in runs]
        return [state.type.value for state in found if state and state.is_final()]

    _until(lambda: len(states()) == len(runs), 400)
    return states()


def _until(done: Callable[[], Any], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {os.getpid()}: not done within {timeout_s} s")
        time.sleep(0.1)
