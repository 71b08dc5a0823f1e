"""What the GPU lock installs can be imported, and with it every module of this project, on a machine without a GPU too."""

import json
import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
STACK = [
    "vllm",
    "vllm.platforms.cuda",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.entrypoints.openai.api_server",
    "torch",
    "triton",
    "flashinfer",
    "transformer_engine.pytorch",
    "megatron.core",
    "megatron.core.extensions.transformer_engine",
    "megatron.bridge",
    "fla",
    "ray",
    "prefect",
    "datasets",
    "s3fs",
    "mlflow",
]
ROOMS = ["flows", "tasks", "environments", "infra"]
PROGRAM = """
import importlib, json, pathlib, sys
from infra.models import megatron_cpu
from tests.gpu_env.device import load_driver
load_driver(pathlib.Path(sys.argv[1]).parent)  # vLLM's libraries want the driver's, which is of the machine
megatron_cpu.install()  # as a trainer does; it answers for CUDA only where there is none
faults = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as fault:
        faults[name] = f"{type(fault).__name__}: {fault}"
json.dump(faults, open(sys.argv[1], "w"))
"""


def faults_of(modules: list[str], tmp_path: Path) -> dict[str, str]:
    """What each module that cannot be imported says, in a process of its own."""
    out = tmp_path / "faults.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(out)],
        input=json.dumps(modules),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def modules_of(room: str) -> list[str]:
    files = sorted((ROOT / room).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.stem != "__main__"]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("modules", [STACK[:5], STACK[5:8], STACK[8:]], ids=["vllm", "kernels", "rest"])
def test_the_stack_imports(modules: list[str], tmp_path: Path):
    assert faults_of(modules, tmp_path) == {}


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_of_the_project_imports(room: str, tmp_path: Path):
    modules = modules_of(room)
    assert len(modules) > 3
    assert faults_of(modules, tmp_path) == {}


def test_transformer_engine_was_compiled_against_the_torch_that_is_here():
    """megatron-core takes Transformer Engine for absent, without a word, when its torch library does not load."""
    program = (
        "import torch, transformer_engine.pytorch, transformer_engine_torch;"
        "from megatron.core.extensions.transformer_engine import HAVE_TE; assert HAVE_TE; print('found')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("found"), done.stderr[-2000:]


def test_what_the_project_asks_for_is_what_is_installed():
    """As `pip check` for this project alone: the lock overrides what others ask for by statement (pyproject.toml)."""
    from importlib.metadata import version

    wanted = [Requirement(text) for text in requires("policyflow") or []]
    here = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": "gpu"})]
    assert {"vllm", "torch", "transformer-engine"} <= {one.name for one in here}
    assert [str(one) for one in here if version(one.name) not in one.specifier] == []
