"""Rollout engines under test: what they are asked, pairs of them to compare, and versions for them to follow."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file

from infra.models.checkpoint import checkpoint_shapes
from infra.numerics.mxfp8 import Mxfp8Config, quantize_tensors, quantized_names
from infra.runs.run import Run
from infra.storage import schemas
from infra.storage.artifacts import ArtifactRef
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.support import tiny_models
from tests.support.tensor_engine import TensorTrainer

type Maker = Callable[[Path, int], Path]
"""Writes a model folder of random weights, by a seed."""

FAMILIES: dict[str, Any] = {"params": [tiny_models.dense, tiny_models.experts], "ids": ["dense", "experts"]}
"""For fixtures: makers of models without and with experts."""
PROBE = [[5, 9, 200, 33, 17] * 9, [7, 8], [3]]
"""Sequences to score."""


def prompts(*contents: str) -> pa.Table:
    """One message each."""
    rows = [
        {
            "prompt_id": f"p{index}",
            "environment": "test",
            "messages": json.dumps([{"role": "user", "content": content}]),
            "text": "",
            "answer": "",
            "metadata": "",
        }
        for index, content in enumerate(contents)
    ]
    return pa.Table.from_pylist(rows, schema=schemas.PROMPT)


PROMPTS = prompts("What is 3 + 4? Reply with the number only, nothing else.", "Hello", "How many legs has a spider?")


def sampled(engine: RolloutEngine, table: pa.Table = PROMPTS, seed: int = 1) -> pa.Table:
    """What an engine samples, but for the name of its policy."""
    return engine.sample(table, seed=seed)[0].drop_columns("policy_version")


class Pair:
    """An engine to bring from one model folder's weights to another's, and one that has loaded the other."""

    def __init__(self, folder: Path, other: Path, settings: RolloutConfig):
        self.folder, self.other = folder, other
        self.engine = RolloutEngine(str(folder), settings)
        self.fresh = RolloutEngine(str(other), settings)

    def close(self) -> None:
        self.fresh.close()
        self.engine.close()


def publish_versions(make: Maker, root: Path, mxfp8: Mxfp8Config | None = None) -> tuple[Path, Path, list[ArtifactRef]]:
    """Versions 0 to 4 of a model with small steps between them, bf16 but for the routers, and the model folders of the
    first and the last. With `mxfp8` versions hold elements and scales; the folders never do."""
    folder = make(root / "model", 0)
    tensors = {
        name: tensor if name.endswith("mlp.gate.weight") else tensor.bfloat16()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    trainer, run = TensorTrainer(tensors), Run(store=f"file://{root}/store", name="r")
    quantised = quantized_names(checkpoint_shapes(folder), mxfp8) if mxfp8 else []
    refs: list[ArtifactRef] = []
    for number in range(5):
        if number:
            generator = torch.Generator().manual_seed(number)
            for tensor in tensors.values():
                tensor.copy_(tensor.float() + 1e-3 * torch.randn(tensor.shape, generator=generator))
        trainer.tensors = dict(quantize_tensors(tensors.items(), quantised))
        stage, parent = run.stage("policy", number, []), refs[-1] if refs else None
        refs.append(commit(trainer, stage, SyncConfig(anchor_every=10), parent))
    last = shutil.copytree(folder, root / "last")
    save_file(tensors, last / "model.safetensors", {"format": "pt"})
    return folder, last, refs


class Versions(Pair):
    """Versions to follow, and engines at the first and the last."""

    def __init__(self, make: Maker, root: Path, settings: RolloutConfig):
        folder, last, self.refs = publish_versions(make, root)
        super().__init__(folder, last, settings)
