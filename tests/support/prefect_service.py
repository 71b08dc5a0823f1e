"""A real Prefect server with a worker, the repository's deployments at a small size, and questions to ask them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import yaml
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.objects import FlowRun

from infra.orchestration.server import REPOSITORY, LocalPrefect
from tests.support.pipeline import TINY

SECRET = "s3cr3t-that-must-stay-where-it-is"
ENVIRONMENT = TINY["dataset"]["environment"]


@dataclass
class Service:
    """What the tests use of it."""

    prefect: LocalPrefect
    client: SyncPrefectClient
    folder: Path

    @property
    def store(self) -> str:
        return f"file://{self.folder}/store"

    def deploy_small(self, model: Path) -> None:
        """Register prefect.yaml again with a tiny model, a store of the test's, and all triggers on."""
        # A killed run's slot is free a minute later: with two, the resumed one need not wait for it.
        self.client.update_global_concurrency_limit("machine", GlobalConcurrencyLimitUpdate(limit=2))
        document = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
        resources = {"slots": "machine", "threads": 1}
        config = TINY | {"store": self.store, "model": str(model), "steps": 8, "resources": resources}
        config |= {"sync": {"verify_fresh": False}, "credentials": "store-keys"}
        Secret(value={"POLICYFLOW_STORE_KEY": SECRET}).save("store-keys", overwrite=True)
        for deployment in document["deployments"]:
            flow = deployment["entrypoint"].partition(":")[2]
            if deployment["name"] == "addition":
                deployment["parameters"] |= {"dataset": {"environment": ENVIRONMENT}, "store": self.store}
            elif deployment["name"] == "smollm2-cpu" and flow == "train":
                deployment["parameters"] = {"config": config}
            for trigger in deployment.get("triggers", []):
                trigger["enabled"] = True
                if flow == "publish":  # what the deployment's own defaults would hold
                    evaluation = {"samples": TINY["evaluation"]["samples"]}
                    trigger["parameters"]["config"] |= {"resources": resources, "evaluation": evaluation}
        file = self.folder / "prefect-small.yaml"
        file.write_text(yaml.safe_dump(document))
        self.prefect.deploy(file)

    def start(self, deployment: str, **parameters: Any) -> FlowRun:
        """What `prefect deployment run` does."""
        found = self.client.read_deployment_by_name(deployment)
        return self.client.create_flow_run_from_deployment(found.id, parameters=parameters)

    def wait(self, flow_run: FlowRun | UUID, timeout_s: float = 240) -> FlowRun:
        """The flow run when it has ended."""
        id = flow_run if isinstance(flow_run, UUID) else flow_run.id

        def ended() -> FlowRun | None:
            run = self.client.read_flow_run(id)
            return run if run.state and run.state.is_final() else None

        return self.until(f"flow run {id} ends", ended, timeout_s)

    def completed(self, flow_run: FlowRun, timeout_s: float) -> FlowRun:
        """The flow run when it is Completed; Crashed is final too, until the automation has seen it."""

        def completed() -> FlowRun | None:
            run = self.client.read_flow_run(flow_run.id)
            return run if run.state and run.state.is_completed() else None

        return self.until(f"flow run {flow_run.id} is complete", completed, timeout_s)

    def runs_of(self, flow: str) -> list[FlowRun]:
        """Flow runs of a flow, oldest first."""
        body = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC"}
        runs = self.client.request("POST", "/flow_runs/filter", json=body).json()
        return [
            FlowRun.model_validate(run) for run in runs if run["state_name"] != "Scheduled" or not run["auto_scheduled"]
        ]

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Events of these names, oldest first."""
        body = {"filter": {"event": {"name": list(names)}, "order": "ASC"}, "limit": 50}
        return self.client.request("POST", "/events/filter", json=body).json()["events"]

    def artifacts(self, flow_run: FlowRun) -> dict[str, Any]:
        """Artifacts of a flow run: key -> (type, data)."""
        body = {"artifacts": {"flow_run_id": {"any_": [str(flow_run.id)]}}}
        found = self.client.request("POST", "/artifacts/filter", json=body).json()
        return {artifact["key"]: (artifact["type"], artifact["data"]) for artifact in found}

    def until[T](self, what: str, ask: Callable[[], T | None], timeout_s: float = 120) -> T:
        """Ask until there is an answer."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if answer := ask():
                return answer
            time.sleep(0.5)
        log = (self.prefect.home / "worker.log").read_text(errors="replace")[-5000:]
        raise AssertionError(f"not within {timeout_s} s: {what}\n{log}")


def processes_of(flow_run: FlowRun) -> list[psutil.Process]:
    """The flow run's processes: its own, Ray's and the engines'."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run.id) and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_flow(flow_run: FlowRun) -> None:
    """kill -9 of the flow's own process, as the kernel does when memory runs out."""
    processes = processes_of(flow_run)
    pids = {process.pid for process in processes}
    roots = [process for process in processes if process.ppid() not in pids]
    assert roots, "the flow runs"
    for process in roots:
        process.kill()
