"""The pipeline as it lives in Prefect: a real server, a real worker, the deployments of prefect.yaml."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from flows.reporting.failures import default_run
from flows.settings import PROFILES
from infra.orchestration.server import HOST, LocalPrefect
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef, open_artifact
from infra.storage.store import Store
from tests.support.browser import chromium, screenshot
from tests.support.models import write_tiny_llama
from tests.support.prefect_service import ENVIRONMENT, SECRET, Service, kill_flow, processes_of

pytestmark = pytest.mark.timeout(900)  # the first test that needs a trained run waits for it


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    environment = {"POLICYFLOW_HOME": str(folder / "home")}
    (folder / "home").mkdir()
    prefect = LocalPrefect(folder / "prefect", port, environment)
    with prefect, temporary_settings({PREFECT_API_URL: prefect.api_url}), get_client(sync_client=True) as client:
        yield Service(prefect, client, folder)


@pytest.fixture(scope="module")
def small(service: Service) -> Service:
    """The service with deployments that take seconds."""
    service.deploy_small(write_tiny_llama(service.folder / "model"))
    return service


def deployments(service: Service) -> dict[str, Any]:
    flows = {flow.id: flow.name for flow in service.client.read_flows()}
    return {f"{flows[d.flow_id]}/{d.name}": d for d in service.client.read_deployments()}


def test_a_fresh_server_has_every_deployment_with_pool_queue_limit_and_schedule(service: Service):
    found = deployments(service)
    names = {path.stem for path in PROFILES.glob("*.yaml")} | {"smollm2-docker"}
    flows = ("train", "evaluate", "publish")
    assert set(found) == {"prepare/addition"} | {f"{flow}/{name}" for flow in flows for name in names}
    train = found["train/smollm2-cpu"]
    assert (train.work_pool_name, train.work_queue_name) == ("local", "interactive")
    assert train.global_concurrency_limit.limit == 1
    assert [(schedule.schedule.cron, schedule.active) for schedule in train.schedules] == [("0 2 * * *", False)]
    assert found["train/smollm2-gpu"].work_pool_name == "kubernetes"
    assert found["train/smollm2-docker"].work_pool_name == "docker"


def test_a_fresh_server_has_the_automations(service: Service):
    found = {one["name"]: one for one in service.client.request("POST", "/automations/filter", json={}).json()}
    assert found["policyflow: end silent runs"]["enabled"]
    assert found["policyflow: resume crashed runs"]["enabled"]
    assert found["policyflow: train smollm2-cpu on a finished dataset"]["enabled"]
    assert not found["policyflow: publish every finished run"]["enabled"]


def test_the_forms_have_a_help_text_and_a_default_for_every_setting(service: Service):
    for name, deployment in deployments(service).items():
        schema = deployment.parameter_openapi_schema
        assert schema["properties"], name
        for title, definition in schema["definitions"].items():
            for key, setting in definition.get("properties", {}).items():
                group = schema["definitions"].get(setting.get("$ref", "").rpartition("/")[2], {})
                help_text = setting.get("description") or group.get("description")
                assert help_text, f"{name}: {title}.{key} has no help"
                required = key in definition.get("required", [])
                assert required or "default" in setting, f"{name}: {title}.{key} has no default"


def test_a_wrong_setting_is_refused_before_there_is_a_flow_run(service: Service):
    train = deployments(service)["train/smollm2-cpu"]
    body = {"parameters": {"config": {"steps": "many"}}}
    with pytest.raises(Exception, match="409|422"):
        service.client.request("POST", f"/deployments/{train.id}/create_flow_run", json=body)


def test_the_server_listens_on_loopback_only(service: Service):
    import psutil

    listening = {
        connection.laddr.ip
        for process in service.prefect.processes.values()
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for connection in one.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


@pytest.fixture(scope="module")
def trained(small: Service) -> tuple[FlowRun, ArtifactRef]:
    """A training run that the event of a dataset has started, killed after its first step."""
    prepared = small.wait(small.start("prepare/addition"))
    assert prepared.state and prepared.state.is_completed(), prepared.state
    (event,) = small.until("dataset.ready is there", lambda: small.events("dataset.ready"))
    run = small.until("the event starts training", lambda: next(iter(small.runs_of("train")), None), 60)
    training = Run(store=small.store, name=default_run(str(run.id)))

    def a_step_is_committed() -> bool:
        head = training.head()
        return head is not None and head.step >= 1

    small.until("a step is committed", a_step_is_committed, 240)
    kill_flow(run)
    return small.completed(run, 400), ArtifactRef.model_validate(event["payload"]["dataset"])


@pytest.mark.slow
def test_an_event_starts_training_on_exactly_the_dataset_that_it_names(small: Service, trained: tuple):
    run, dataset = trained
    assert run.parameters["dataset"] == dataset.model_dump()
    pinned = Run(store=small.store, name=default_run(str(run.id))).pinned("dataset", lambda: dataset)
    assert pinned == dataset


@pytest.mark.slow
def test_a_killed_flow_run_is_resumed_by_the_automation(small: Service, trained: tuple):
    run, _ = trained
    assert run.run_count == 2
    head = Run(store=small.store, name=default_run(str(run.id))).head()
    assert head is not None and head.step == 8
    (failed,) = small.events("run.failed")
    assert failed["payload"]["state"] == "Crashed"
    assert "it goes on" in failed["payload"]["advice"] or "starts it again" in failed["payload"]["advice"]


@pytest.mark.slow
def test_nothing_of_a_finished_flow_run_is_left(small: Service, trained: tuple):
    run, _ = trained
    small.until("its processes are gone", lambda: not processes_of(run), 30)


def pages(service: Service, run: FlowRun) -> str:
    """What the keys of a training run's pages begin with."""
    name = default_run(str(run.id))
    return f"{name}-{Run(store=service.store, name=name).id()}"


@pytest.mark.slow
def test_a_run_leaves_the_artifacts_that_a_person_wants(small: Service, trained: tuple):
    run, _ = trained
    name = pages(small, run)
    artifacts = small.artifacts(run)
    kind, table = artifacts[f"{name}-samples"]
    assert kind == "table"
    assert set(json.loads(table)[0]) == {"prompt", "response", "reward", "advantage"}
    kind, picture = artifacts[f"{name}-curves"]
    assert kind == "image" and "data:image/png;base64," in picture
    kind, page = artifacts[f"{name}-report"]
    assert kind == "markdown"
    for what in ("MLflow", "resumed from", "final policy", "publish/smollm2-cpu", small.store):
        assert what in page
    kind, page = artifacts[f"{name}-failure"]
    assert "What to do" in page


@pytest.mark.slow
def test_a_run_tells_its_versions_and_its_end_and_where_its_policy_comes_from(small: Service, trained: tuple):
    run, dataset = trained
    name = default_run(str(run.id))
    committed = small.events("policy.committed")
    versions = {event["payload"]["version"] for event in committed}
    assert {6, 7, 8} <= versions <= set(range(1, 9)), "a killed process takes its last events with it, no others"
    (finished,) = small.until("run.finished", lambda: small.events("run.finished"))
    assert finished["resource"]["prefect.resource.id"] == f"policyflow.run.{name}"
    assert finished["payload"]["steps"] == 8
    made = small.events("prefect.asset.materialization.succeeded")
    policy = next(
        event for event in made if event["resource"]["prefect.resource.id"] == finished["payload"]["policy"]["uri"]
    )
    assert dataset.uri in {related["prefect.resource.id"] for related in policy["related"]}


@pytest.mark.slow
def test_a_finished_run_is_published_and_judged(small: Service, trained: tuple):
    trained_run, _ = trained
    publication = small.until("the event starts publish", lambda: next(iter(small.runs_of("publish")), None), 60)
    ended = small.wait(publication, 300)
    assert ended.state and ended.state.is_completed(), ended.state
    (event,) = small.until("policy.published", lambda: small.events("policy.published"))
    payload = event["payload"]
    assert payload["run"] == default_run(str(trained_run.id))
    model = open_artifact(ArtifactRef.model_validate(payload["model"]))
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(model.names)
    (evaluation,) = small.events("evaluation.finished")
    promoted = small.events("policy.promoted")
    assert bool(promoted) == (evaluation["payload"]["gain_low"] > 0), "the evaluation decides"


@pytest.mark.slow
def test_another_pipelines_event_starts_a_run_and_a_cancelled_one_frees_everything(small: Service):
    problems = small.folder / "problems.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": i}) + "\n" for i in range(40)))
    known = {run.id for run in small.runs_of("train")}
    output = subprocess.run(
        [
            sys.executable,
            "-m",
            "flows.produce_dataset",
            str(problems),
            "--store",
            small.store,
            "--name",
            "addition",
            "--environment",
            ENVIRONMENT,
        ],
        env=small.prefect.environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert output.returncode == 0, output.stderr
    run = small.until("a run starts", lambda: next((r for r in small.runs_of("train") if r.id not in known), None), 60)
    assert run.parameters["dataset"]["uri"] in output.stdout
    small.until("its engines load", lambda: len(processes_of(run)) > 3, 120)
    environments = [process.environ() for process in processes_of(run)]
    assert any(one.get("POLICYFLOW_STORE_KEY") == SECRET for one in environments), "engines get the block's variables"
    small.client.set_flow_run_state(run.id, Cancelling())
    ended = small.wait(run, 120)
    assert ended.state and ended.state.is_cancelled(), ended.state
    small.until("its processes are gone", lambda: not processes_of(run), 60)

    def told() -> list[str]:
        payloads = [event["payload"] for event in small.events("run.failed")]
        return [one["state"] for one in payloads if one["run"] == default_run(str(run.id))]

    small.until("it is told, and not as a crash", lambda: told() == ["Cancelled"], 30)
    small.until(
        "its slot is free",
        lambda: small.client.read_global_concurrency_limit_by_name("machine").active_slots == 0,
        120,
    )


@pytest.mark.slow
def test_a_run_whose_worker_is_gone_too_is_found_by_its_silence_and_resumed(small: Service):
    config = deployments(small)["train/smollm2-cpu"].parameters["config"]
    run = small.start("train/smollm2-cpu", config=config | {"steps": 1})
    small.until("its engines load", lambda: len(processes_of(run)) > 3, 120)
    small.prefect.processes["worker"].kill()
    kill_flow(run)
    crashed = small.wait(run, 180)
    assert crashed.state and crashed.state.is_crashed(), crashed.state
    assert "No heartbeat" in (crashed.state.message or "")
    small.prefect.start_worker()
    small.completed(run, 240)


@pytest.mark.slow
def test_a_person_starts_a_run_by_the_form_and_sees_its_graph_and_artifacts(small: Service):
    prepare = small.client.read_deployment_by_name("prepare/addition")
    with chromium() as page:
        page.goto(f"{small.prefect.ui_url}/deployments/deployment/{prepare.id}/run")
        page.get_by_text("Where prompts come from").wait_for()
        page.locator("input").first.fill("started-by-the-form")
        areas = [page.locator("textarea").nth(index) for index in range(page.locator("textarea").count())]
        names = [
            area for area in areas if area.input_value() == "addition"
        ]  # the dataset's name, as the event gives it
        names[-1].fill("named-in-the-form")
        screenshot(page, "form")
        page.get_by_role("button", name="Submit").click()
        started = small.until(
            "the form's run is there",
            lambda: next(
                (r for r in small.runs_of("prepare") if r.parameters.get("name") == "named-in-the-form"), None
            ),
        )
        ended = small.wait(started)
        assert ended.state and ended.state.is_completed(), ended.state
        page.goto(f"{small.prefect.ui_url}/runs/flow-run/{started.id}")
        page.get_by_text("2 Task runs").wait_for()
        assert page.locator("canvas").evaluate("graph => graph.width * graph.height") > 0
        page.wait_for_timeout(1500)  # the graph is drawn, not written: the screenshot shows it
        screenshot(page, "run")
        page.get_by_text("Artifacts", exact=True).click()
        page.get_by_text(re.compile("named-in-the-form-[0-9a-f]{12}-dataset")).first.click()
        page.get_by_text("the first prompts of train").wait_for()
        screenshot(page, "artifact")


@pytest.mark.slow
def test_a_person_sees_the_schedule_the_trigger_and_the_picture(small: Service, trained: tuple):
    train = small.client.read_deployment_by_name("train/smollm2-cpu")
    run, _ = trained
    with chromium() as page:
        page.goto(f"{small.prefect.ui_url}/deployments/deployment/{train.id}")
        page.get_by_text("nightly").wait_for()
        page.get_by_text("policyflow: train smollm2-cpu on a finished dataset").wait_for()
        screenshot(page, "deployment")
        newest = {"artifacts": {"key": {"any_": [f"{pages(small, run)}-curves"]}}, "sort": "CREATED_DESC"}
        curves = small.client.request("POST", "/artifacts/filter", json=newest).json()[0]
        page.goto(f"{small.prefect.ui_url}/artifacts/artifact/{curves['id']}")
        page.locator("img").first.wait_for()
        assert page.locator("img").first.evaluate("picture => picture.naturalWidth") == 640
        screenshot(page, "curves")
        page.goto(f"{small.prefect.ui_url}/runs/flow-run/{run.id}")
        page.get_by_text("Task runs").first.wait_for()
        page.wait_for_timeout(5000)
        screenshot(page, "training")


@pytest.mark.slow
def test_no_secret_is_in_the_database_the_logs_or_the_store(small: Service, trained: tuple):
    found = [
        path
        for path in small.folder.rglob("*")
        if path.is_file() and path.suffix != ".safetensors" and SECRET.encode() in path.read_bytes()
    ]
    assert not found
    assert Store.at(small.store).keys("runs")
