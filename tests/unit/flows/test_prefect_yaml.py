"""prefect.yaml: every deployment's parameters are settings that its flow takes, and the profiles' own."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore
from prefect.events.schemas.deployment_triggers import DeploymentTriggerTypes
from pydantic import TypeAdapter

from flows import deployments, settings
from flows.config import EvaluateConfig, PublishConfig, TrainConfig
from flows.settings import PROFILES, load_config
from infra.errors import BadInput
from infra.orchestration import workspace
from infra.orchestration.events import EVENTS
from tasks.dataset.config import DatasetConfig

ROOT = Path(__file__).resolve().parents[3]
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
CONFIGS = {"train": TrainConfig, "evaluate": EvaluateConfig, "publish": PublishConfig}


def flow_name(deployment: dict[str, Any]) -> str:
    return deployment["entrypoint"].partition(":")[2]


def names(flow: str) -> set[str]:
    return {d["name"] for d in DEPLOYMENTS if flow_name(d) == flow}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: f"{flow_name(d)}/{d['name']}")
def test_a_deployments_parameters_are_valid(deployment: dict[str, Any]):
    name, parameters = flow_name(deployment), deployment["parameters"]
    if name == "prepare":
        DatasetConfig.model_validate(parameters["dataset"])
    else:
        config = CONFIGS[name].model_validate(parameters["config"])
        assert config.resources.slots in workspace.LIMITS
        assert config.resources.slots_needed(at_once=name == "train") <= workspace.LIMITS[config.resources.slots]
    assert deployment["entrypoint"] == f"flows.{name}:{name}", (
        "a module: a file's neighbours would hide others' modules"
    )
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    assert flow.name == name
    assert {"policyflow", name} <= set(deployment["tags"]), "what the automations match on"
    assert deployment["description"]


def test_the_parameters_are_todays_profiles():
    text = deployments.FILE.read_text()
    assert text == deployments.updated(text), "`python -m flows.deployments` writes them"


def test_a_changed_profile_changes_what_its_deployments_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for path in PROFILES.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text().replace("lr: 3.0e-5", "lr: 7.0e-5"))
    (tmp_path / "mine-gpu.yaml").write_text("store: s3://b/x\nresources: {rollout_gpus: 1, update_gpus: 1}\n")
    monkeypatch.setattr(settings, "PROFILES", tmp_path)
    made = yaml.safe_load(deployments.updated(deployments.FILE.read_text()))
    (train,) = [d for d in made["deployments"] if d["entrypoint"] == "flows.train:train" and d["name"] == "smollm2-cpu"]
    assert train["parameters"]["config"]["update"]["lr"] == 7e-5
    assert made["definitions"]["mine_gpu_version"] == {
        "store": "s3://b/x",
        "resources": {"rollout_gpus": 1, "update_gpus": 1, "slots": "gpus"},
    }


def test_marks_that_are_gone_are_named():
    with pytest.raises(BadInput, match=r"prefect\.yaml: the marks .* are not there"):
        deployments.updated("name: policyflow\n")


@pytest.mark.parametrize("profile", sorted(path.stem for path in PROFILES.glob("*.yaml")))
def test_a_profile_is_trained_evaluated_and_published_by_deployments(profile: str):
    assert all(profile in names(flow) for flow in CONFIGS)
    (train,) = [d for d in DEPLOYMENTS if flow_name(d) == "train" and d["name"] == profile]
    config, wanted = TrainConfig.model_validate(train["parameters"]["config"]), load_config(profile)
    assert config.identity() == wanted.identity()
    assert config.steps == wanted.steps
    slots = {"slots": config.resources.slots}
    assert config.resources == wanted.resources.model_copy(update=slots)


@pytest.mark.parametrize("profile", sorted(path.stem for path in PROFILES.glob("*.yaml")))
def test_a_profiles_run_can_be_visited_with_the_resources_of_its_evaluation_and_publication(profile: str):
    for deployment in DEPLOYMENTS:
        if deployment["name"] == profile and flow_name(deployment) in ("evaluate", "publish"):
            resources = deployment["parameters"]["config"]["resources"]
            TrainConfig.model_validate(load_config(profile).model_dump() | {"resources": resources})


def test_the_docker_deployments_are_the_quickstarts_profile_with_its_store_in_the_volume():
    found = {flow_name(d): d for d in DEPLOYMENTS if d["work_pool"]["name"] == "docker"}
    assert set(found) == set(CONFIGS)
    volumes = workspace.job_template("docker")["variables"]["properties"]["volumes"]["default"]
    mounts = [volume.split(":")[1] for volume in volumes]
    for flow, deployment in found.items():
        config = CONFIGS[flow].model_validate(deployment["parameters"]["config"])
        assert any(config.store.startswith(f"{mount}/") for mount in mounts), "a container's own files end with it"
    train = TrainConfig.model_validate(found["train"]["parameters"]["config"])
    assert train.identity() == load_config("smollm2-cpu").identity()


def test_one_training_run_a_model_at_a_time():
    for deployment in DEPLOYMENTS:
        if flow_name(deployment) == "train":
            assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


def test_triggers_listen_to_events_that_are_emitted():
    known = {kind.event for kind in EVENTS}
    for deployment in DEPLOYMENTS:
        for trigger in deployment.get("triggers", []):
            parsed: Any = TypeAdapter(DeploymentTriggerTypes).validate_python(trigger)
            assert set(parsed.expect) <= known


def test_automations_are_about_these_deployments_only():
    for values in yaml.safe_load((ROOT / "infra/orchestration/automations.yaml").read_text()):
        trigger: Any = AutomationCore.model_validate(values).trigger
        related = trigger.match_related if isinstance(trigger.match_related, list) else [trigger.match_related]
        tags = [one.root["prefect.resource.id"] for one in related if one.root["prefect.resource.role"] == "tag"]
        assert "prefect.tag.policyflow" in tags, "another team's flow runs are not ours to end or to start"


@pytest.mark.parametrize("name", sorted(workspace.POOLS))
def test_a_pool_with_gpus_asks_for_as_many_as_the_run_reserves(name: str):
    for deployment in DEPLOYMENTS:
        variables = deployment["work_pool"].get("job_variables", {})
        if deployment["work_pool"]["name"] == name and "gpus" in variables:
            flow = flow_name(deployment)
            config = CONFIGS[flow].model_validate(deployment["parameters"]["config"])
            assert variables["gpus"] == config.resources.gpus(at_once=flow == "train")
