"""Policy versions of tensors on the device: what is published, and what an engine there becomes, is the host's to the bit."""

from pathlib import Path

import pytest
import torch

from infra.numerics.mxfp8 import dequantize, quantize, quantize_tensors, rounded
from infra.policy.follow import follow
from infra.policy.version import describe
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.gpu.device import DEVICE
from tests.support.tensor_engine import TensorEngine, TensorTrainer

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    """Of each dtype some, on the host: a step changes some elements by little."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.{str(dtype).removeprefix('torch.')}": torch.randn(shape, generator=generator).to(dtype)
        for dtype in DTYPES
        for name, shape in {"embedding": (300, 64), "weight": (96, 64), "norm": (64,)}.items()
    }
    for number in range(step):
        generator = torch.Generator().manual_seed(1 + number)
        for tensor in tensors.values():
            moved = torch.rand(tensor.shape, generator=generator) < 0.2
            tensor[moved] *= 1.01
    return tensors


def published(folder: Path, device: torch.device) -> list[ArtifactRef]:
    """Versions 0 to 3: a full one, and changes."""
    run, refs = Run(store=f"file://{folder}/{device.type}", name="r"), list[ArtifactRef]()
    trainer = TensorTrainer({})
    for step in range(4):
        trainer.tensors = {name: tensor.to(device) for name, tensor in tensors_at(step).items()}
        refs.append(commit(trainer, run.stage("policy", step, []), SyncConfig(), refs[-1] if refs else None))
    return refs


def test_versions_have_the_host_s_digests(tmp_path: Path):
    ours, hosts = published(tmp_path / "a", DEVICE), published(tmp_path / "b", torch.device("cpu"))
    assert [describe(ref).policy_digest for ref in ours] == [describe(ref).policy_digest for ref in hosts]


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["its own dtypes", "an engine in fp32"])
def test_an_engine_on_the_device_becomes_each_version_to_the_bit(tmp_path: Path, dtype: torch.dtype | None):
    engine = TensorEngine({name: tensor.to(DEVICE) for name, tensor in tensors_at(0).items()}, dtype)
    addresses = {name: tensor.data_ptr() for name, tensor in engine.memory.items()}
    for step, ref in enumerate(published(tmp_path, DEVICE)):
        follow(engine, ref)
        for name, tensor in tensors_at(step).items():
            assert engine.memory[name].device.type == DEVICE.type
            assert torch.equal(engine.memory[name].cpu().to(tensor.dtype), tensor), name
    assert engine.whole == 1, "then only changes came"
    assert addresses == {name: tensor.data_ptr() for name, tensor in engine.memory.items()}


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_mxfp8_s_numbers_are_the_host_s(scale: float):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * scale
    x[0] = 0
    ours, hosts = quantize(x.to(DEVICE)), quantize(x)
    assert torch.equal(ours[0].cpu().view(torch.uint8), hosts[0].view(torch.uint8)) and torch.equal(
        ours[1].cpu(), hosts[1]
    )
    assert torch.equal(dequantize(*ours).cpu(), dequantize(*hosts))
    assert torch.equal(rounded(x.to(DEVICE), dim=0).cpu(), rounded(x, dim=0))


def test_a_quantised_version_is_the_host_s(tmp_path: Path):
    digests = []
    for device in (DEVICE, torch.device("cpu")):
        tensors = {name: tensor.to(device) for name, tensor in tensors_at(0).items()}
        trainer = TensorTrainer(dict(quantize_tensors(tensors.items(), ["weight.bfloat16"])))
        stage = Run(store=f"file://{tmp_path}/{len(digests)}", name="r").stage("policy", 0, [])
        digests.append(describe(commit(trainer, stage, SyncConfig(), None)).policy_digest)
    assert digests[0] == digests[1]
