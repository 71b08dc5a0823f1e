"""Whole runs of a small Beam in bf16, with an adapter and in MXFP8, and their publication. The flows check themselves: trainer and
engine after every sync, a fresh engine at the end, the published folder in transformers and vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.models.beam.tiny import write_beam_tiny
from infra.storage.artifacts import ArtifactRef, find_artifact, open_artifact
from infra.storage.store import Store
from tests.support.pipeline import REPO, Pipeline

TARGETS = "[linear_qkv, linear_gate, linear_proj, linear_fc1, linear_fc2]"
LORA = ["policy=lora", f"lora.targets={TARGETS}", "lora.rank=4"]
MXFP8 = ["precision=mxfp8", "mxfp8.emulation=true"]


BF16 = ["rollout.dtype=bfloat16", "update.precision=bfloat16"]
"""As on a GPU, where implementations of one policy round differently."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "settings"),
    [
        ("bf16", BF16),
        ("lora", LORA),
        ("mxfp8", MXFP8),
        ("mxfp8-over-bf16", [*BF16, *MXFP8]),
    ],
)
def test_a_run_ends_verified_and_is_published(tmp_path: Path, run: str, settings: list[str]):
    pipeline = Pipeline(tmp_path, write_beam_tiny(tmp_path / "model"))
    output = pipeline.train(run, "steps=2", "evaluation.samples=1", *settings)
    assert f"run {run} is complete" in output
    report = pipeline.report(run)
    assert report["steps"] == 2

    more = [f"adapter_folder={tmp_path / 'adapter'}", "fused_experts=true"] if run == "lora" else []
    command = [sys.executable, "-m", "flows", "publish", f"run={run}", f"store={tmp_path / 'store'}"]
    environment = {**os.environ, "POLICYFLOW_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    done = subprocess.run(
        [*command, f"folder={tmp_path / 'published'}", "evaluation.samples=1", *more],
        cwd=REPO,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "published" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "adapter" / "adapter_config.json").is_file() == (run == "lora")
    checked = open_artifact(find(Store.at(str(tmp_path / "store")), f"runs/{run}", "check-"))
    assert set(checked.metadata["max_diff"]) == {"transformers", "vllm"}


def find(store: Store, folder: str, kind: str) -> ArtifactRef:
    """The only artifact below `folder` whose name begins so."""
    keys = [key.removesuffix("/manifest.json") for key in store.keys(folder) if key.endswith("/manifest.json")]
    (key,) = [key for key in keys if key.rpartition("/")[2].startswith(kind)]
    found = find_artifact(store, key)
    assert found is not None
    return found
