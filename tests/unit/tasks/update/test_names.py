"""A parameter has one name in checkpoints, whichever layers hold it."""

import pytest

from tasks.update.names import portable


@pytest.mark.parametrize(
    ("held", "stored"),
    [
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.3.input_layernorm.weight"),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_bias", "decoder.layers.3.pre_mlp_layernorm.bias"),
        (
            "decoder.layers.3.mlp.experts.linear_fc2.weight17",
            "decoder.layers.3.mlp.experts.local_experts.17.linear_fc2.weight",
        ),
        (
            "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
            "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
        ),
        ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"),
        ("decoder.layers.3.mlp.experts.linear_fc1.adapter.linear_in.weight",) * 2,
        ("decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight",) * 2,
        ("decoder.layers.3.input_layernorm.weight",) * 2,
    ],
)
def test_a_name_is_that_of_megatrons_own_layers(held: str, stored: str):
    assert portable(held) == portable(portable(held)) == stored
