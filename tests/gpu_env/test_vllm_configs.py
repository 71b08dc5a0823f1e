"""Every GPU profile, and every combination of policy, precision and layout that the docs allow, through vLLM's own configuration."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.settings import load_config
from infra.models.beam.config import BeamConfig
from tests.support import tiny_models

PROFILES = ("beam-lora", "beam-bf16", "beam-mxfp8")
HOPPER, BLACKWELL = 9, 10
POLICIES = {"full": ["policy=full"], "lora": ["policy=lora", "lora.rank=32", "lora.targets=[linear_qkv, linear_proj]"]}
PRECISIONS = {"bf16": ["precision=bf16"], "mxfp8": ["precision=mxfp8"]}
LAYOUTS = {
    "1": [],
    "tp2": ["rollout.tensor_parallel_size=2", "resources.rollout_gpus=2"],
    "tp2-ep": [
        "rollout.tensor_parallel_size=2",
        "resources.rollout_gpus=2",
        "rollout.engine={enable_expert_parallel: true}",
    ],
    "tp2-pp2": [
        "rollout.tensor_parallel_size=2",
        "rollout.pipeline_parallel_size=2",
        "rollout.routes=off",
        "resources.rollout_gpus=4",
    ],
    "pp4": ["rollout.pipeline_parallel_size=4", "rollout.routes=off", "resources.rollout_gpus=4"],
}


def of_vllm(capability: int, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """vLLM's answers, case by case, on a device of this compute capability."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    command = [sys.executable, "-m", "tests.gpu_env.vllm_configs", str(capability), str(folder)]
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(cases), done.stderr[-3000:]
    return answers


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config.json of Reflection-Beam-1.0."""
    folder = tmp_path_factory.mktemp("beam")
    BeamConfig(architectures=["BeamForCausalLM"], dtype="bfloat16").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_each_gpu_profile_is_what_vllm_takes(capability: int, full_size: str, tmp_path: Path):
    cases = [{"profile": name, "settings": [f"model={full_size}"], "model": full_size} for name in PROFILES]
    for name, answer in zip(PROFILES, of_vllm(capability, cases, tmp_path), strict=True):
        if name == "beam-mxfp8" and capability == HOPPER:
            assert (
                answer["refused"]
                == "BadInput: precision mxfp8: NVIDIA H200 has no MXFP8 units (Blackwell and later do)"
            )
            continue
        config = load_config(name)
        assert answer == {
            "architecture": "BeamForCausalLM",
            "dtype": "torch.bfloat16",
            "quantization": "mxfp8" if name == "beam-mxfp8" else None,
            "tensor": config.rollout.tensor_parallel_size,
            "pipeline": 1,
            "executor": "mp",
            "cuda_graphs": True,
            "lora_rank": 32 if name == "beam-lora" else None,
            "routes": True,
            "max_model_len": 8192,
        }, name


@pytest.mark.parametrize("model", ["dense", "experts", "beam"])
def test_every_combination_that_we_take_is_taken_by_vllm(model: str, tmp_path: Path):
    """On Blackwell, where all precisions are. What is refused is refused by us, before vLLM is asked."""
    folder = str(getattr(tiny_models, model)(tmp_path / model))
    common = ["resources.update_gpus=1", f"model={folder}", "rollout.max_model_len=64", "mxfp8.train=false"]
    cases, names = [], []
    layouts = [name for name in LAYOUTS if model != "dense" or "ep" not in name]  # that one is refused: test_layout
    for policy, precision, layout in itertools.product(POLICIES, PRECISIONS, layouts):
        settings = [
            *POLICIES[policy],
            *PRECISIONS[precision],
            *(LAYOUTS[layout] or ["resources.rollout_gpus=1"]),
            *common,
        ]
        if precision == "bf16":
            settings.remove("mxfp8.train=false")
        cases.append({"profile": "smollm2-gpu", "settings": settings, "model": folder})
        names.append(f"{policy} {precision} {layout}")
    answers = dict(zip(names, of_vllm(BLACKWELL, cases, tmp_path), strict=True))
    assert {name: answer["refused"] for name, answer in answers.items() if "refused" in answer} == {}
    for name, answer in answers.items():
        assert answer["quantization"] == ("mxfp8" if " mxfp8 " in name else None), name
        assert answer["lora_rank"] == (32 if name.startswith("lora") else None), name
        assert answer["routes"] == (model != "dense" and "pp" not in name.rpartition(" ")[2]), name
        assert answer["dtype"] == "torch.bfloat16", name
