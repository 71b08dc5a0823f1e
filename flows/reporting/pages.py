"""Where a run's things are, for a person who reads its page in Prefect."""

import json
import shlex

import yaml
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_UI_URL

from flows.session import Session
from infra.orchestration.tracking import Tracker
from infra.runs.run import Head, Run


def note_flow_run(run: Run) -> list[str]:
    """Add this flow run to those that have worked on the run; their ids, oldest first."""
    ids = run.read_json("flow_runs.json") or []
    if flow_run.id and flow_run.id not in ids:
        ids = [*ids, flow_run.id]
        run.write_json("flow_runs.json", ids)
    return ids


def run_links(session: Session, flow_runs: list[str], head: Head) -> dict[str, str]:
    """What -> where, as markdown: MLflow, the store, the flow runs before this one, the final policy."""
    run = session.run
    before = [flow_run_link(one) for one in flow_runs if one != flow_run.id]
    return {
        "MLflow": mlflow_link(session.tracker),
        "store": f"`{run.store}/runs/{run.name}`",
        "resumed from": ", ".join(before) or "nothing: one flow run made it all",
        "final policy": f"`{head.policy.uri}`",
        "its digest": f"`{head.policy.digest}`",
        "publish it": f"`{publish_command(session)}`",
    }


def publish_command(session: Session) -> str:
    """What publishes the run's last version: the deployment of the same name as this flow run's, else this machine."""
    run, resources = session.run, session.config.resources.model_dump(exclude_defaults=True)
    if not deployment.name:
        return f"python -m flows publish run={run.name} {setting('store', run.store)}"
    config = json.dumps({"run": run.name, "store": run.store, "resources": resources})
    return f"prefect deployment run publish/{deployment.name} --param config={shlex.quote(config)}"


def setting(name: str, value: str) -> str:
    """`name=value` as a word of a command that a person copies: read by a shell, then as YAML."""
    spelled = value if yaml.safe_load(value) == value else json.dumps(value, ensure_ascii=False)
    return shlex.quote(f"{name}={spelled}")


def flow_run_link(flow_run_id: str) -> str:
    """A link to the flow run's page, where the UI's address is known."""
    ui = PREFECT_UI_URL.value()
    return f"[{flow_run_id[:8]}]({ui}/runs/flow-run/{flow_run_id})" if ui else f"`{flow_run_id}`"


def mlflow_link(tracker: Tracker) -> str:
    """A link to the run where MLflow is a server, else how to see it."""
    run_id = tracker.opened(timeout_s=5)
    if tracker.uri.startswith("http"):
        return f"[{run_id}]({tracker.uri}/#/experiments/{tracker.experiment_id}/runs/{run_id})"
    return f"run `{run_id}`; `make mlflow-ui`, then http://127.0.0.1:5000"
