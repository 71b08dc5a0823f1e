"""Rollouts of a bf16 Beam in vLLM, an update that replays their routes in Megatron, and the sync back: k3, and the fp32
router's bits, from one end to the other."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow.parquet as parquet
import pytest
import torch

from infra.models.beam.checkpoint import is_router
from infra.policy import reader, writer
from infra.policy.follow import follow
from infra.policy.version import describe
from infra.storage import schemas
from infra.storage.artifacts import ArtifactRef
from infra.storage.store import Store
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tests.bench import bench_replay

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    bench_replay.write_model(folder, prompts=12)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> RolloutEngine:
    return RolloutEngine(str(folder / "model"), RolloutConfig(dtype="bfloat16", max_model_len=128, kv_cache_gib=0.25))


@pytest.fixture(scope="module")
def rollouts(folder: Path, engine: RolloutEngine) -> Any:
    bench_replay.write_rollouts(engine, folder, samples=2)
    return parquet.read_table(folder / "scored.parquet")


@pytest.fixture(scope="module")
def trained(folder: Path, rollouts: Any) -> dict[str, Any]:
    """Figures of the first update with and without replay, and the version after some updates."""
    return bench_replay.call(train_and_publish, folder)


def train_and_publish(folder: Path) -> dict[str, Any]:
    from tasks.update.config import UpdateConfig
    from tasks.update.trainer import Trainer

    table = parquet.read_table(folder / "scored.parquet")
    settings = {"precision": "bfloat16", "lr": 1e-3, "router_bias_rate": 1e-3}
    trainers = {
        r: Trainer(str(folder / "model"), UpdateConfig(replay=r, **settings), seed=0) for r in ("rollout", "off")
    }
    k3 = {replay: trainer.update(table)["k3_mean"] for replay, trainer in trainers.items()}
    trainer = trainers["rollout"]
    for _ in range(STEPS - 1):
        trainer.update(table)
    base = {name: tensor.clone() for name, tensor in Trainer(str(folder / "model"), trainer.config, seed=0).export()}
    changed = [name for name, tensor in trainer.export() if is_router(name) and not torch.equal(tensor, base[name])]
    store = Store.at(f"file://{folder}/store")
    ref = writer.write_full(store, "version", trainer.export(), version=1, step=STEPS)
    return {"k3": k3, "changed": changed, "ref": ref}


def test_routes_travel_with_the_rollouts(rollouts: Any):
    for row in rollouts.to_pylist():
        routes = schemas.unpack_routes(row)
        tokens = len(row["prompt_ids"]) + len(row["response_ids"])
        assert routes is not None and routes.layers == (1, 2, 3)
        assert routes.experts.shape == (tokens, 3, 4) and routes.experts.dtype == "uint8"
        assert routes.mask.tolist() == [True] * (tokens - 1) + [False]


def test_replay_lowers_k3_tenfold(trained: dict[str, Any]):
    assert trained["k3"]["rollout"] * 10 < trained["k3"]["off"], trained["k3"]


def test_the_routers_fp32_bits_are_the_trainers_in_version_and_engine(engine: RolloutEngine, trained: dict[str, Any]):
    ref: ArtifactRef = trained["ref"]
    version = describe(ref)
    routers = [name for name in version.tensors if is_router(name)]
    assert len(routers) == 6 and sorted(trained["changed"]) == sorted(routers), "weights and biases were trained"
    assert {version.tensors[name].dtype for name in routers} == {"float32"}
    assert {info.dtype for name, info in version.tensors.items() if name not in routers} == {"bfloat16"}
    follow(engine, ref)
    held = dict(engine.export())
    for name, tensor in reader.read(ref):
        assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), name
    lost = [name for name in routers if torch.equal(held[name], held[name].bfloat16().float())]
    assert not lost, "no router could have come through bf16"
