"""Work pools, cluster manifests and images: valid by Prefect's own classes and by Kubernetes' schemas."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from infra.orchestration import workspace

ROOT = Path(__file__).resolve().parents[4]
KUBERNETES = "1.33"
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


def variables(name: str) -> dict[str, Any]:
    return workspace.job_template(name)["variables"]["properties"]


@pytest.mark.parametrize("name", sorted(workspace.POOLS))
def test_every_variable_is_used_and_every_use_has_a_variable(name: str):
    template = workspace.job_template(name)
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(variables(name))


@pytest.mark.parametrize("name", sorted(workspace.POOLS))
def test_every_variable_has_a_help_text_and_a_default_or_is_the_workers(name: str):
    for key, variable in variables(name).items():
        assert variable.get("description"), key
        assert "default" in variable or key in {"env", "labels", "annotations", "name", "command"}, key


def configured(kind: Any, pool: str, **values: Any) -> Any:
    """The worker's configuration for a flow run, as the worker makes it from the pool's template."""
    from prefect.utilities.templating import apply_values

    template = workspace.job_template(pool)
    defaults = {key: v["default"] for key, v in variables(pool).items() if "default" in v}
    return kind(**apply_values(template["job_configuration"], {**defaults, **values}))


def kubernetes_job(**values: Any) -> dict[str, Any]:
    from prefect.client.schemas.objects import FlowRun
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    configuration = configured(KubernetesWorkerJobConfiguration, "kubernetes", **values)
    configuration.prepare_for_flow_run(FlowRun(flow_id="00000000-0000-0000-0000-000000000000", name="tidy-fox"))
    return configuration.job_manifest


def test_a_gpu_job_is_what_kubernetes_takes_and_asks_for_gpus():
    job = kubernetes_job(gpus=4, env={"RAY_ADDRESS": "auto"})
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert {"name": "RAY_ADDRESS", "value": "auto"} in container["env"]
    assert pod["nodeSelector"]["nvidia.com/gpu.product"]
    assert job["spec"]["completions"] == 1


def test_a_docker_container_gets_the_gpus():
    from docker.types import HostConfig
    from prefect_docker.worker import DockerWorkerJobConfiguration

    configuration = configured(DockerWorkerJobConfiguration, "docker")
    assert configuration.image == "policyflow:0.1.0-gpu"
    options = configuration.container_create_kwargs or {}
    host = HostConfig(version="1.43", device_requests=options["device_requests"], shm_size=options["shm_size"])
    assert host["DeviceRequests"][0]["Count"] == -1
    assert host["ShmSize"] == 16 * 2**30
    assert not configuration.privileged


@pytest.mark.parametrize("path", sorted((ROOT / "infra/k8s").glob("*.yaml")), ids=lambda path: path.name)
def test_cluster_manifests_are_what_kubernetes_takes(path: Path):
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] != "RayCluster":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
            continue
        # KubeRay's own kind: its pods are Kubernetes' pod templates.
        spec = document["spec"]
        assert spec["rayVersion"] == re.search(r'"ray==([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", sorted((ROOT / "infra/images").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_images_have_pinned_bases_and_copy_what_there_is(path: Path):
    text = path.read_text()
    base = re.search(r"^ARG BASE=(\S+)$", text, re.M)
    assert base and re.search(r":\d+\.\d+\.\d+[^@]*@sha256:[0-9a-f]{64}$", base[1]), "to a patch version and its digest"
    assert re.findall(r"^FROM (\S+)", text, re.M) == ["${BASE}"]
    assert "--require-hashes" in text
    assert "--compile-bytecode" in text and "PYTHONDONTWRITEBYTECODE" not in text, "no process compiles torch anew"
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.M):
        for source in sources.split():
            assert (ROOT / source).exists(), source
    assert text.rstrip().endswith("USER 1000")


def test_the_deployments_of_a_pool_set_variables_that_it_has():
    for deployment in DEPLOYMENTS:
        pool = deployment["work_pool"]
        assert pool["work_queue_name"] in workspace.QUEUES
        assert set(pool.get("job_variables", {})) <= set(variables(pool["name"]))
        schema = workspace.job_template(pool["name"])["variables"]
        jsonschema.validate(pool.get("job_variables", {}), schema)


def test_uv_is_pinned_with_its_hashes_wherever_it_is_installed():
    lock = (ROOT / "requirements/uv.txt").read_text()
    assert re.match(r"uv==[0-9.]+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+", lock)
    for path in (ROOT / "Makefile", *(ROOT / "infra/images").glob("*.Dockerfile")):
        installs = re.findall(r"bin/pip install .*", path.read_text())
        assert installs, path
        assert all("--require-hashes -r" in line for line in installs), path


def deployments_on(pool: str) -> list[Any]:
    return [pytest.param(d, id=f"{d['entrypoint']}/{d['name']}") for d in DEPLOYMENTS if d["work_pool"]["name"] == pool]


@pytest.mark.parametrize("deployment", deployments_on("docker"))
def test_a_docker_deployment_is_a_container_of_the_cpu_image_without_gpus(deployment: dict[str, Any]):
    from prefect_docker.worker import DockerWorkerJobConfiguration

    configuration = configured(DockerWorkerJobConfiguration, "docker", **deployment["work_pool"]["job_variables"])
    assert configuration.image == "policyflow:0.1.0-cpu"
    assert configuration.volumes == ["policyflow:/data"]
    assert configuration.mem_limit == "16g"
    assert (configuration.container_create_kwargs or {})["device_requests"] == []
    assert deployment["pull"] == [
        {"prefect.deployments.steps.set_working_directory": {"directory": "/opt/policyflow"}}
    ], "the image has the code"


@pytest.mark.parametrize("deployment", deployments_on("kubernetes"))
def test_a_kubernetes_deployment_is_a_job_that_kubernetes_takes(deployment: dict[str, Any]):
    job = kubernetes_job(**deployment["work_pool"]["job_variables"])
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    pod = job["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/data"]["name"]]["emptyDir"]["sizeLimit"], "POLICYFLOW_HOME of the images"
    models = mounts["/models"]
    assert models["readOnly"]
    if "beam" in deployment["tags"]:  # the image cannot make it
        claims = [d["metadata"]["name"] for d in manifests("models.yaml") if d["kind"] == "PersistentVolumeClaim"]
        claim = volumes[models["name"]]["persistentVolumeClaim"]
        assert [claim["claimName"]] == claims
        assert claim["readOnly"]
        model = deployment["parameters"]["config"].get("model", "/models/")  # evaluate, publish: the run's
        assert model.startswith("/models/")


def test_ray_nodes_find_a_model_where_jobs_do():
    (cluster,) = manifests("raycluster.yaml")
    for group in cluster["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/models"]]["persistentVolumeClaim"]["claimName"] == "policyflow-models"


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "infra/k8s" / name).read_text()))
