"""What weight sync relies on: a version's digest belongs to the weights, and nothing but those weights is read back."""

from pathlib import Path

import pytest
import torch

from infra.errors import BadInput, Corrupted
from infra.policy import reader, writer
from infra.policy.version import describe, digest_tensors, tensor_digest
from infra.storage.artifacts import ArtifactWriter, Store, find_artifact, open_artifact

WEIGHTS = {
    "router.weight": torch.randn(4, 8),
    "mlp.weight": torch.randn(8, 8).bfloat16(),
    "scale": torch.randn(8).to(torch.float8_e4m3fn),
    "bias": torch.tensor(0.5),
}


def test_a_version_is_read_back_bit_for_bit(file_store: Store) -> None:
    ref = writer.write_full(file_store, "v1", iter(WEIGHTS.items()), version=1, step=10, base="blake3:00")
    back = dict(reader.read(ref))
    assert back.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert tensor_digest(back[name]) == tensor_digest(tensor)
    what = describe(ref)
    assert (what.version, what.step, what.form, what.base) == (1, 10, "full", "blake3:00")
    assert what.tensors["mlp.weight"].dtype == "bfloat16"
    assert what.tensors["router.weight"].shape == [4, 8]
    assert what.policy_digest == digest_tensors(WEIGHTS.items())


def test_equal_weights_have_one_digest_however_sharded_and_ordered(file_store: Store) -> None:
    one = writer.write_full(file_store, "one", WEIGHTS.items(), version=1, step=1)
    two = writer.write_full(file_store, "two", reversed(WEIGHTS.items()), version=9, step=2, shard_bytes=16)
    assert describe(one).policy_digest == describe(two).policy_digest
    assert one.digest != two.digest
    assert len(open_artifact(two).names) > len(open_artifact(one).names)


@pytest.mark.parametrize(
    "changed",
    [
        {**WEIGHTS, "bias": torch.tensor(0.25)},
        {**WEIGHTS, "bias": torch.tensor([0.5])},
        {**WEIGHTS, "bias": torch.tensor(0.5).view(torch.int32)},
        {("bias2" if name == "bias" else name): tensor for name, tensor in WEIGHTS.items()},
        {name: tensor for name, tensor in WEIGHTS.items() if name != "bias"},
    ],
    ids=["value", "shape", "dtype", "name", "missing"],
)
def test_any_other_weights_have_another_digest(changed: dict[str, torch.Tensor]) -> None:
    assert digest_tensors(changed.items()) != digest_tensors(WEIGHTS.items())


def test_strides_do_not_change_a_tensors_digest() -> None:
    tensor = torch.randn(3, 5).bfloat16()
    assert tensor_digest(tensor) == tensor_digest(tensor.T.contiguous().T)
    assert tensor_digest(tensor) != tensor_digest(tensor.T)


def test_a_damaged_version_yields_no_tensor_of_the_damaged_file(file_store: Store) -> None:
    ref = writer.write_full(file_store, "v1", WEIGHTS.items(), version=1, step=0)
    artifact = open_artifact(ref)
    path = Path(artifact.store.path(artifact.manifest.place("model-00000.safetensors")))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Corrupted, match=r"model-00000\.safetensors"):
        next(reader.read(ref))


def test_what_is_no_policy_is_refused(file_store: Store) -> None:
    with ArtifactWriter(file_store, "rows", "rollouts") as w:
        w.bytes("x", b"")
    with pytest.raises(BadInput, match="rollouts"):
        describe(w.ref)
    with pytest.raises(BadInput, match="no tensors"):
        writer.write_full(file_store, "none", [], version=1, step=0)
    with pytest.raises(BadInput, match="step"):
        writer.write_full(file_store, "v", WEIGHTS.items(), version=1, step=0, metadata={"step": 3})
    assert find_artifact(file_store, "none") is None


def test_an_adapter_is_a_version_that_goes_with_another(file_store: Store) -> None:
    base = writer.write_full(file_store, "v1", WEIGHTS.items(), version=1, step=0)
    adapter = {"mlp.lora_A": torch.randn(2, 8), "mlp.lora_B": torch.zeros(8, 2)}
    digest, settings = describe(base).policy_digest, {"r": 2, "lora_alpha": 4}
    ref = writer.write_full(
        file_store,
        "a2",
        adapter.items(),
        version=2,
        step=1,
        form="adapter",
        base=digest,
        parent=base,
        adapter_config=settings,
    )
    what = describe(ref)
    assert (what.form, what.parent, what.base, what.is_full) == ("adapter", base, digest, True)
    assert what.adapter_config == settings
    assert digest_tensors(reader.read(ref)) == digest_tensors(adapter.items()) == what.policy_digest
