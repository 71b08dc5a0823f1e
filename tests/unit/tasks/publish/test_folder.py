"""A published folder: the policy's tensors, the base's tokenizer, and proof that it is what was trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import BadInput
from infra.numerics.mxfp8 import Mxfp8Config, quantize_tensors, quantized_names, rounded
from infra.numerics.tolerance import Limits
from infra.policy import writer
from infra.policy.adapters import PREFIX, LoraConfig, peft_config
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, open_artifact
from infra.storage.store import Store
from tasks.publish.check import NotThePolicy, compare_transformers, require_near
from tasks.publish.folder import fetch_model, model_config, model_folder, write_adapter, write_model
from tests.support.models import add_strays, store_head, write_tiny_llama

LORA = LoraConfig(rank=4, alpha=8)
SEQUENCES = [[5, 9, 33, 2, 71], [8, 8, 1, 90, 14]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def weights(base: Path) -> dict[str, torch.Tensor]:
    """Trained weights: the base's, moved a little."""
    from safetensors.torch import load_file

    return {name: tensor * 1.01 for name, tensor in load_file(base / "model.safetensors").items()}


def adapter(base: Path) -> dict[str, torch.Tensor]:
    """A random one of all projections."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            path, (out, inputs) = PREFIX + name.removesuffix(".weight"), weight.shape
            tensors[f"{path}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.1
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.1
    return tensors


def logprobs(base: Path, tensors: dict[str, torch.Tensor]) -> list[list[float]]:
    """What the policy says of SEQUENCES, by transformers in this process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base).eval()
    model.load_state_dict(tensors, strict=False)
    ids = torch.tensor(SEQUENCES)
    with torch.inference_mode():
        scores = model(ids).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None])[..., 0].tolist()


def published(
    store: Store, base: Path, tensors: dict[str, torch.Tensor], **more: Any
) -> tuple[ArtifactRef, ArtifactRef]:
    """(policy, model)."""
    policy = writer.write_full(store, "policy", tensors.items(), version=1, step=1, shard_bytes=100_000, **more)
    stage = Stage(store=store.url, folder="models", name="model", inputs=(policy,))
    return policy, write_model(stage, policy, str(base), {"run": "r", "version": 1})


def test_transformers_loads_the_policy_and_another_one_is_told(file_store: Store, base: Path):
    tensors = weights(base)
    policy, model = published(file_store, base, tensors)
    expected = logprobs(base, tensors)
    assert compare_transformers(model, policy, SEQUENCES, expected, Limits(1e-4), 300) < 1e-4

    other = {name: tensor.clone() for name, tensor in tensors.items()}
    other["model.norm.weight"][3] += 0.5
    elsewhere = writer.write_full(file_store, "other", other.items(), version=2, step=2)
    with pytest.raises(NotThePolicy, match=r"model\.norm\.weight the first"):
        compare_transformers(model, elsewhere, SEQUENCES, expected, Limits(1e-4), 300)


def test_an_adapter_is_published_merged_and_alone_and_both_are_what_peft_computes(
    file_store: Store, base: Path, tmp_path: Path
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tensors = adapter(base)
    policy, model = published(file_store, base, tensors, adapter_config=peft_config(LORA, tensors))
    write_adapter(policy, tmp_path / "adapter", fused_experts=False)

    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    ids = torch.tensor(SEQUENCES)
    with torch.inference_mode():
        scores = whole(ids).logits[:, :-1].log_softmax(-1)
    by_peft = scores.gather(-1, ids[:, 1:, None])[..., 0]
    assert (by_peft - torch.tensor(logprobs(base, {}))).abs().mean() > 1e-2, "the adapter does something"
    assert compare_transformers(model, policy, SEQUENCES, by_peft.tolist(), Limits(1e-4), 300) < 1e-4
    assert (fetch_model(model, tmp_path / "merged") / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", ["adapter", "mxfp8"])
def test_what_is_made_of_the_base_is_made_of_its_own_files(tmp_path: Path, base: Path, kind: str):
    """Not of an old shard, another's adapter or a second copy of the tied embedding beside them."""
    beside = shutil.copytree(base, tmp_path / "beside")
    store_head(beside)
    add_strays(beside)
    tensors, more = adapter(base), {"adapter_config": peft_config(LORA, adapter(base))}
    if kind == "mxfp8":
        plain, more = weights(base), {}
        names = quantized_names({name: tuple(tensor.shape) for name, tensor in plain.items()}, Mxfp8Config())
        tensors = dict(quantize_tensors(plain.items(), names))
    found = []
    for number, folder in enumerate((base, beside)):
        _, model = published(Store.at(str(tmp_path / str(number))), folder, tensors, **more)
        artifact = open_artifact(model)
        found.append((sorted(artifact.names), artifact.metadata["tensors"]))
    assert found[0] == found[1] and "adapter_config.json" not in found[0][0]


def test_a_version_in_mxfp8_is_published_as_the_numbers_that_it_stands_for(file_store: Store, base: Path):
    tensors = weights(base)
    names = quantized_names({name: tuple(tensor.shape) for name, tensor in tensors.items()}, Mxfp8Config())
    policy, model = published(file_store, base, dict(quantize_tensors(tensors.items(), names)))
    expected = {name: rounded(tensor) if name in names else tensor for name, tensor in tensors.items()}
    assert compare_transformers(model, policy, SEQUENCES, logprobs(base, expected), Limits(1e-4), 300) < 1e-4


def test_a_whole_policy_has_no_adapter_to_write(file_store: Store, base: Path, tmp_path: Path):
    policy, _ = published(file_store, base, weights(base))
    with pytest.raises(BadInput, match="adapter_folder: version 1 is a whole policy; leave it out"):
        write_adapter(policy, tmp_path / "adapter", fused_experts=False)


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


@pytest.mark.parametrize("limits", [Limits(0.1), Limits(10, 0.1)])
def test_a_difference_that_is_not_a_number_is_a_difference(limits: Limits):
    with pytest.raises(NotThePolicy):
        require_near("vLLM", [[float("nan"), -1.0]], [[-1.0, -1.0]], limits)


def test_a_difference_is_judged_by_the_largest_and_in_the_mean():
    found, expected = [[-1.0, -2.0, -4.0, -3.0]], [[-1.0, -2.0, -3.0, -3.0]]
    assert require_near("vLLM", found, expected, Limits(1.0)) == 1.0
    assert require_near("vLLM", found, expected, Limits(10, 0.25)) == 1.0
    with pytest.raises(NotThePolicy, match=r"from the training engine's by 1 nats \(at most 0\.9 is allowed\)"):
        require_near("vLLM", found, expected, Limits(0.9))
    with pytest.raises(NotThePolicy, match=r"by 0\.25 nats in the mean"):
        require_near("vLLM", found, expected, Limits(10, 0.2))
