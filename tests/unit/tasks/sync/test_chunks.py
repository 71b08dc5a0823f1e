"""How a version is cut, into files, frames and shares, says nothing about what it is: one policy, one digest a tensor."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from infra.policy import reader
from infra.policy.follow import follow
from infra.policy.version import describe, digest_tensors
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef, open_artifact
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.support.tensor_engine import TensorEngine, TensorTrainer
from tests.unit.infra.policy.test_follow import step, tensors

CUTS = {"one": (2**30, 1), "two": (25_000, 1), "a tensor each": (1, 1), "two, by two processes": (25_000, 2)}
"""Bytes of weights in a file or frame, and processes that write."""


def versions(folder: Path, config: SyncConfig, size: int, processes: int) -> list[ArtifactRef]:
    """Three, each cut at `size` bytes."""
    run, refs, weights = Run(store=f"file://{folder}", name="r"), list[ArtifactRef](), tensors()
    weights["second"] = weights["embed"].clone()
    trainer = TensorTrainer(weights, processes=processes)
    with (
        mock.patch("infra.storage.safetensors.SHARD_BYTES", size),
        mock.patch("infra.policy.deltas.FILE_BYTES", size),
        mock.patch("infra.policy.deltas.frame_bytes", return_value=size),
    ):
        for number in range(3):
            step(weights, number, lr=1e-3)
            parent = refs[-1] if refs else None
            refs.append(commit(trainer, run.stage("policy", number, []), config, parent))
    return refs


FORMS = {"full": SyncConfig(form="full"), "delta": SyncConfig(), "anchor": SyncConfig(anchor_every=1)}


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS.keys())
def test_a_version_is_the_same_in_one_chunk_and_in_several(tmp_path: Path, config: SyncConfig) -> None:
    found, chunks = {}, {}
    for cut, (size, processes) in CUTS.items():
        refs = versions(tmp_path / cut.replace(" ", "-"), config, size, processes)
        engine = TensorEngine(tensors() | {"second": tensors()["embed"]})
        for ref in refs:
            follow(engine, ref)
        described = [describe(ref) for ref in refs]
        last = dict(reader.read(refs[-1]))
        assert engine.version == described[-1].policy_digest == digest_tensors(last.items())
        assert all(torch.equal(engine.memory[name], tensor) for name, tensor in last.items())
        found[cut] = [
            (what.policy_digest, {name: (info.digest, info.dtype) for name, info in what.tensors.items()})
            for what in described
        ]
        chunks[cut] = (len(open_artifact(refs[0]).names), [len(what.frames or []) for what in described[1:]])
    assert all(same == found["one"] for same in found.values())
    assert len({str(cuts) for cuts in chunks.values()}) >= 3, (
        f"they are cut differently, or this shows nothing: {chunks}"
    )
    if config.form != "full":
        assert chunks["one"][1] < chunks["two"][1]
