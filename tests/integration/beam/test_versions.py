"""Small things of a Beam that a version must keep: a router's fp32 correction bias to its last bit, however it is cut."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.models.beam.tiny import write_beam_tiny
from infra.policy import reader
from infra.policy.follow import follow
from infra.policy.version import describe, dtype_of
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.integration.beam.test_trainer import make, settings

BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
NAMES = [BIAS.format(layer) for layer in (1, 2, 3)]
CUTS = {"one": 2**30, "several": 2**20}
"""Bytes of weights in a frame or a file."""


def biases(trainer: object) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export() if name in NAMES}


def next_up(trainer: object) -> None:
    """Each bias to the next number above it: a change in the eighth digit."""
    (gpt,) = trainer.model.gpts
    for module in gpt.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias.copy_(torch.nextafter(module.expert_bias, torch.full((1,), torch.inf)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beam_tiny(tmp_path_factory.mktemp("beam"))


@pytest.mark.parametrize(("rate", "dtype"), [(0.0, torch.bfloat16), (1e-3, torch.float32)])
def test_a_bias_has_the_folders_dtype_unless_training_moves_it(tmp_path: Path, rate: float, dtype: torch.dtype):
    """It is a buffer, no parameter; where it moves, it does so in fp32, and bf16 would lose that."""
    folder = write_beam_tiny(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[name].bfloat16() for name in NAMES}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = biases(make(folder, **settings(router_bias_rate=rate)))
    assert found.keys() == {*NAMES}
    assert all(found[name].dtype == dtype and torch.equal(found[name], tensors[name].to(dtype)) for name in NAMES)


@pytest.fixture(scope="module")
def chains(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ArtifactRef]]:
    """Three versions that differ in the biases' last bits, for each way to cut them."""
    made = {}
    for cut, size in CUTS.items():
        trainer, refs = make(folder, **settings()), list[ArtifactRef]()
        run = Run(store=f"file://{tmp_path_factory.mktemp('store')}", name="r")
        with (
            mock.patch("infra.storage.safetensors.SHARD_BYTES", size),
            mock.patch("infra.policy.deltas.FILE_BYTES", size),
            mock.patch("infra.policy.deltas.frame_bytes", return_value=size),
        ):
            for number in range(3):
                if number:
                    next_up(trainer)
                config = SyncConfig(anchor_every=2)
                refs.append(commit(trainer, run.stage("policy", number, []), config, refs[-1] if refs else None))
        made[cut] = refs
    return made


def test_a_change_in_the_eighth_digit_is_in_the_version(chains: dict[str, list[ArtifactRef]], folder: Path):
    base = load_file(folder / "model.safetensors")
    for number, ref in enumerate(chains["one"]):
        tensors = dict(reader.read(ref))
        assert {tensors[name].dtype for name in NAMES} == {torch.float32}
        for name in NAMES:
            apart = (tensors[name].double() - base[name].double()).abs() / base[name].double().abs()
            assert apart.max() < 3e-7 and (apart > 0).all() == (number > 0)
        others = [name for name in base if name not in NAMES]
        assert all(torch.equal(tensors[name], base[name]) for name in others)


def test_a_version_in_one_chunk_and_in_several_is_one_policy(chains: dict[str, list[ArtifactRef]]):
    one, several = ([describe(ref) for ref in chains[cut]] for cut in CUTS)
    assert [what.policy_digest for what in one] == [what.policy_digest for what in several]
    assert len({what.policy_digest for what in one}) == 3
    for left, right in zip(one, several, strict=True):
        assert {n: i.digest for n, i in left.tensors.items()} == {n: i.digest for n, i in right.tensors.items()}
    assert len({info.file for info in one[0].tensors.values()}) < len({i.file for i in several[0].tensors.values()})


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[RolloutEngine]:
    engine = RolloutEngine(str(folder), RolloutConfig(kv_cache_gib=0.05, dtype=request.param, max_model_len=64))
    yield engine
    engine.close()


def test_the_engines_bias_is_the_versions_bit_for_bit(engine: RolloutEngine, chains: dict[str, list[ArtifactRef]]):
    """In an engine of either precision, by what changed and whole."""
    for refs in chains.values():
        for ref in [*refs, refs[0], refs[2]]:
            follow(engine, ref)
            what = describe(ref)
            held = dict(engine.export())
            expected = dict(reader.read(ref))
            for name in NAMES:
                assert held[name].dtype == torch.float32 and torch.equal(held[name], expected[name]), name
            dtypes = {name: dtype_of(info) for name, info in what.tensors.items()}
            assert engine.digests(dtypes) == {name: info.digest for name, info in what.tensors.items()}
