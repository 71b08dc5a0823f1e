"""What a Beam's config.json may say: the published defaults, per-layer types, and one clear error for all else."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from infra.errors import BadInput
from infra.models.beam import checkpoint, semantics
from infra.models.beam.config import BeamConfig
from infra.models.beam.register import register

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}


def test_the_defaults_are_those_of_the_published_model() -> None:
    config = BeamConfig()
    assert (config.num_hidden_layers, config.hidden_size, config.num_experts, config.num_experts_per_tok) == (
        24,
        2048,
        128,
        8,
    )
    assert config.layer_types == ["sliding_attention"] * 24 and config.mlp_layer_types == ["sparse"] * 24
    assert config.head_dim == 64 and config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert not config.tie_word_embeddings and config.final_logit_softcapping is None and not config.grouped_routing


def test_a_saved_config_is_read_back_by_the_auto_class(tmp_path) -> None:
    register()
    register()
    config = BeamConfig(
        **SMALL, layer_types=["full_attention", "sliding_attention"], mlp_layer_types=["dense", "sparse"]
    )
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "beam"
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is BeamConfig and read.to_json_string() == config.to_json_string()


@pytest.mark.parametrize(
    "keyed", [{"sliding_attention": ROPE, "full_attention": None}, {"full_attention": ROPE}, ROPE, {"rope_theta": 500}]
)
def test_rope_parameters_may_be_keyed_by_layer_type(keyed: dict) -> None:
    assert BeamConfig(**SMALL, rope_parameters=keyed).rope_parameters == ROPE


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer_types": ["full_attention"]}, r"layer_types has 1 entries.*num_hidden_layers = 2"),
        ({"layer_types": ["full_attention", "linear"]}, r"layer_types names 'linear'.*'sliding_attention'"),
        ({"mlp_layer_types": ["dense"] * 3}, r"mlp_layer_types has 3 entries.*num_hidden_layers = 2"),
        ({"mlp_layer_types": ["dense", "moe"]}, r"mlp_layer_types names 'moe'.*'sparse'"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings = True.*false"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'.*silu"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads = 3.*divisor of num_attention_heads \(4\)"),
        ({"hidden_size": 30}, r"hidden_size = 30.*multiple of num_attention_heads"),
        ({"head_dim": 7}, r"head_dim = 7.*even"),
        ({"sliding_window": None}, r"sliding_window = None.*whole number"),
        ({"num_experts": 0}, r"num_experts = 0"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok = 9.*at most the 8"),
        ({"n_group": 3, "topk_group": 1}, r"n_group = 3.*divisor of num_experts \(8\)"),
        ({"n_group": 8, "topk_group": 1}, r"n_group = 8.*two experts a group"),
        ({"n_group": 4, "topk_group": 5}, r"topk_group = 5.*1 to n_group \(4\)"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, r"num_experts_per_tok = 3.*at most the 2"),
        ({"final_logit_softcapping": 0.0}, r"final_logit_softcapping = 0.0.*null"),
        ({"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}, r"exactly one entry.*2 are not"),
        ({"rope_parameters": {"sliding_attention": None, "full_attention": None}}, r"exactly one entry.*0 are not"),
        ({"rope_parameters": ROPE | {"rope_type": "yarn"}}, r"rope_parameters.rope_type = 'yarn'.*default"),
        ({"rope_parameters": ROPE | {"factor": 2.0}}, r"rope_parameters.*rope_type and rope_theta, no more"),
        ({"rope_parameters": {"rope_theta": 0}}, r"rope_theta = 0.*above 0"),
    ],
)
def test_a_config_that_no_beam_can_have_is_refused_with_what_would_be_right(wrong: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        BeamConfig(**{**SMALL, **wrong})


def test_tensor_parallel_sizes_that_split_a_head_are_refused() -> None:
    config = BeamConfig(**SMALL)
    for fits in (1, 2, 4):  # with 4 ranks, two hold the same KV head
        config.check_tensor_parallel(fits)
    for wrong in (0, 3, 8):
        with pytest.raises(BadInput, match=rf"tensor parallel size = {wrong}.*num_attention_heads \(4\).*\[1, 2, 4\]"):
            config.check_tensor_parallel(wrong)


def test_a_checkpoint_lists_every_tensor_and_only_routers_are_fp32() -> None:
    config = BeamConfig(**SMALL, mlp_layer_types=["dense", "sparse"])
    shapes = checkpoint.shapes(config)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (64, 32)
    assert shapes["model.layers.1.mlp.experts.7.down_proj.weight"] == (32, 16)
    assert "model.layers.0.mlp.gate.weight" not in shapes
    fp32 = [name for name in shapes if checkpoint.dtype_of(name, torch.bfloat16) == torch.float32]
    assert fp32 == ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"]


def test_norm_and_swiglu_round_once_and_a_residual_rounds_both_products() -> None:
    """Rounding twice would differ from the fp64 result rounded to bf16 in one value of some hundred."""
    x, y = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.ones(128, dtype=torch.bfloat16) * 1.0625
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert (semantics.rms_norm(x, weight, 1e-6) != normed.bfloat16()).float().mean() < 1e-3
    gated = wide * wide.sigmoid() * y.double()
    assert (semantics.swiglu(x, y) != gated.bfloat16()).float().mean() < 1e-3
    by_x, by_r = semantics.residual_scales(1, is_attention=False)
    assert (by_x, by_r) == pytest.approx((1 / 5**0.5, 2 / 5**0.5))
    expected = ((by_r * x.float()).bfloat16().float() + (by_x * y.float()).bfloat16().float()).bfloat16()
    assert torch.equal(semantics.residual_add(x, y, (by_x, by_r)), expected)


def test_a_group_is_scored_by_its_two_best_experts_whatever_topk_is() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.8, 0.0, 0.6, 0.6, 0.5, 0.0]])
    assert semantics.choose_experts(scores, 1, n_group=4, topk_group=1).tolist() == [[4]]
    assert semantics.choose_experts(scores, 2, n_group=2, topk_group=1).tolist() == [[0, 2]]
    assert semantics.choose_experts(scores, 1, None, None).tolist() == [[0]]
