"""A published folder: the policy's tensors, the base's tokenizer, and proof that it is what was trained."""

import json
from pathlib import Path

import pytest
import torch

from infra import policy_write
from infra.artifacts import ArtifactRef, open_artifact
from infra.errors import BadInput
from infra.run import Stage
from infra.store import Store
from tasks.publish.check import NotThePolicy, compare_transformers, largest_difference
from tasks.publish.folder import fetch_model, model_config, model_folder, write_model
from tests.models import write_tiny_llama

SEQUENCES = [[5, 9, 33, 2, 71], [8, 8, 1, 90, 14]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def weights(base: Path) -> dict[str, torch.Tensor]:
    """Trained weights: the base's, moved a little."""
    from safetensors.torch import load_file

    return {name: tensor * 1.01 for name, tensor in load_file(base / "model.safetensors").items()}


def logprobs(base: Path, tensors: dict[str, torch.Tensor]) -> list[list[float]]:
    """What the policy says of SEQUENCES, by transformers in this process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base).eval()
    model.load_state_dict(tensors, strict=False)
    ids = torch.tensor(SEQUENCES)
    with torch.inference_mode():
        scores = model(ids).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None])[..., 0].tolist()


def published(store: Store, base: Path, tensors: dict[str, torch.Tensor]) -> tuple[ArtifactRef, ArtifactRef]:
    """(policy, model)."""
    policy = policy_write.write_full(store, "policy", tensors.items(), version=1, step=1, shard_bytes=100_000)
    stage = Stage(store=store.url, folder="models", name="model", inputs=(policy,))
    return policy, write_model(stage, policy, str(base), {"run": "r", "version": 1})


def test_transformers_loads_the_policy_and_another_one_is_told(file_store: Store, base: Path):
    tensors = weights(base)
    policy, model = published(file_store, base, tensors)
    expected = logprobs(base, tensors)
    assert compare_transformers(model, policy, SEQUENCES, expected, 1e-4, 300) < 1e-4

    other = {name: tensor.clone() for name, tensor in tensors.items()}
    other["model.norm.weight"][3] += 0.5
    elsewhere = policy_write.write_full(file_store, "other", other.items(), version=2, step=2)
    with pytest.raises(NotThePolicy, match=r"model\.norm\.weight the first"):
        compare_transformers(model, elsewhere, SEQUENCES, expected, 1e-4, 300)


def test_a_copy_is_the_same_folder_and_never_overwrites(file_store: Store, base: Path, tmp_path: Path):
    _, model = published(file_store, base, weights(base))
    copy = fetch_model(model, tmp_path / "copy")
    folder = Path(model_folder(model).removeprefix("file://"))
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()}
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    assert all((copy / name).exists() for name in index["weight_map"].values())
    with pytest.raises(BadInput, match="exists; name a new one"):
        fetch_model(model, copy)


def test_the_folder_says_where_it_comes_from(file_store: Store, base: Path):
    policy, model = published(file_store, base, weights(base))
    manifest = open_artifact(model).manifest
    assert manifest.inputs == [policy]
    assert manifest.metadata["lineage"] == {"run": "r", "version": 1}


def test_the_configs_dtype_is_the_policys(base: Path):
    config = model_config(base, "bfloat16")
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config


def test_a_difference_that_is_not_a_number_is_a_difference():
    with pytest.raises(NotThePolicy):
        largest_difference("vLLM", [[float("nan")]], [[-1.0]], 0.1)
