"""Adapters' names, layouts and checks. What PEFT itself makes of them is tested in tests/integration/test_lora.py."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from infra.errors import BadInput
from infra.policy.adapters import (
    PREFIX,
    LoraConfig,
    base_name,
    check_fits,
    check_targets,
    check_tuned_configs,
    fuse_experts,
    merged,
    peft_config,
)

SHAPES = {
    "model.embed_tokens.weight": (100, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.gate_proj.weight": (16, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    **{f"model.layers.1.mlp.experts.{e}.{p}_proj.weight": (8, 16) for e in range(3) for p in ("gate", "up")},
    **{f"model.layers.1.mlp.experts.{e}.down_proj.weight": (16, 8) for e in range(3)},
}


def adapter(names: list[str], rank: int = 2) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in names:
        out, inputs = SHAPES[name]
        tensors[f"{PREFIX}{name.removesuffix('.weight')}.lora_A.weight"] = torch.randn(rank, inputs)
        tensors[f"{PREFIX}{name.removesuffix('.weight')}.lora_B.weight"] = torch.randn(out, rank)
    return tensors


MATRICES = [name for name in SHAPES if "proj" in name]


def test_the_engine_is_started_for_the_smallest_rank_that_fits():
    assert [LoraConfig(rank=rank).engine_rank for rank in (1, 8, 9, 64, 300)] == [8, 8, 16, 64, 320]


@pytest.mark.parametrize("target", ["linear_qkv", "*.layers.1.mlp.*.linear_fc1", "decoder.layers.0.mlp.linear_fc1"])
def test_targets_name_modules_by_their_last_part_or_by_a_pattern(target: str):
    check_targets(LoraConfig(targets=(target,)), SHAPES)


@pytest.mark.parametrize("target", ["q_proj", "linear_fc", "*.layers.7.*", "*.layers.0.mlp.linear_fc2"])
def test_a_target_that_matches_nothing_is_named_with_what_there_is(target: str):
    with pytest.raises(BadInput, match=r"matches no module of the model; it has linear_fc1, linear_fc2, linear_gate"):
        check_targets(LoraConfig(targets=("linear_qkv", target)), SHAPES)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, r"tuned is no folder of this machine"),
        ({}, r"tuned has no \.json file; vLLM's benchmarks/kernels/benchmark_moe\.py"),
        ({"NVIDIA_B200_SHRINK.json": "{}", "x.json": "{1"}, r"x\.json is no JSON object of tile sizes"),
        ({"x.json": "[]"}, r"x\.json is no JSON object"),
        ({"NVIDIA_B200_SHRINK.json": "{}"}, None),
    ],
)
def test_a_folder_of_tuned_configs_has_some(tmp_path: Path, files: dict[str, str] | None, message: str | None):
    folder = tmp_path / "tuned"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    config = LoraConfig(tuned_configs=str(folder))
    with pytest.raises(BadInput, match=rf"lora\.tuned_configs: .*{message}") if message else nullcontext():
        check_tuned_configs(config)


def test_an_adapter_of_another_model_or_of_too_high_a_rank_is_refused():
    check_fits(adapter(MATRICES), SHAPES, 8)
    with pytest.raises(BadInput, match="rank 9, but the engine was started for rank 8"):
        check_fits(adapter(MATRICES[:1], rank=9), SHAPES, 8)
    with pytest.raises(BadInput, match=r"layers\.0\.self_attn\.q_proj: the model has no such module"):
        check_fits(adapter(MATRICES[:1]), {}, 8)
    with pytest.raises(BadInput, match=r"for a weight \[16, 16\], the model's is \[16, 32\]"):
        check_fits(adapter(MATRICES[:1]), {MATRICES[0]: (16, 32)}, 8)
    half = {name: tensor for name, tensor in adapter(MATRICES[:1]).items() if "lora_A" in name}
    with pytest.raises(BadInput, match=r"expected lora_A \[rank, in\] and lora_B \[out, rank\]"):
        check_fits(half, SHAPES, 8)


def test_merging_adds_the_scaled_product_once_and_keeps_the_dtype():
    base = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    tensors = adapter(MATRICES[:2])
    result = dict(merged(base.items(), tensors, 0.5))
    for name, tensor in base.items():
        if name in MATRICES[:2]:
            a, b = (tensors[f"{PREFIX}{name.removesuffix('.weight')}.lora_{side}.weight"] for side in "AB")
            assert torch.equal(result[name], (tensor.float() + 0.5 * b @ a).bfloat16())
        else:
            assert result[name] is tensor
    with pytest.raises(BadInput, match="has no such module"):
        dict(merged([], tensors, 0.5))


@pytest.mark.parametrize("shared", [True, False], ids=["one A for gate and up", "an A each"])
def test_fused_experts_hold_each_expert_s_product(shared: bool):
    """PEFT reads A as [E, r, in] and B as [out, r, E]."""
    tensors = adapter(MATRICES)
    path = f"{PREFIX}model.layers.1.mlp.experts"
    if shared:
        for e in range(3):
            tensors[f"{path}.{e}.up_proj.lora_A.weight"] = tensors[f"{path}.{e}.gate_proj.lora_A.weight"]
    fused = fuse_experts(tensors)
    for name, parts in ((f"{path}.base_layer", ("gate_proj", "up_proj")), (path, ("down_proj",))):
        a, b = fused[f"{name}.lora_A.weight"], fused[f"{name}.lora_B.weight"]
        a_ErI, b_EOr = a.view(3, -1, a.shape[1]), b.view(b.shape[0], -1, 3).permute(2, 0, 1)
        assert a_ErI.shape[1] == (2 if shared or len(parts) == 1 else 4)
        for e in range(3):
            product = [
                tensors[f"{path}.{e}.{p}.lora_B.weight"] @ tensors[f"{path}.{e}.{p}.lora_A.weight"] for p in parts
            ]
            assert torch.allclose(b_EOr[e] @ a_ErI[e], torch.cat(product), atol=1e-5)
    assert {name for name in tensors if ".experts." not in name} <= fused.keys()


def test_the_config_names_the_adapted_projections():
    config = peft_config(LoraConfig(rank=2, alpha=4), adapter(MATRICES))
    assert config["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 4, False)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("org/model", "org/model"),
        ("/data/models/Model-1", "Model-1"),
        ("/data/models/Model-1/", "Model-1"),
        ("~/models/Model-1", "Model-1"),
    ],
)
def test_an_adapter_names_its_base_without_a_place_on_this_machine(model: str, name: str):
    assert base_name(model) == name
