"""A layout that a model cannot be split into is refused by name, with a size that fits."""

import json
from pathlib import Path

import pytest

from infra.errors import BadInput
from infra.models.layout import Sizes, check_engine, check_trainer

DENSE = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 6, "intermediate_size": 96}
EXPERTS = DENSE | {"num_experts": 8, "moe_intermediate_size": 48}


def sizes(folder: Path, config: dict) -> Sizes:
    (folder / "config.json").write_text(json.dumps(config))
    return Sizes.of(folder)


def test_sizes_are_those_of_config_json(tmp_path: Path):
    found = sizes(tmp_path, {"text_config": EXPERTS})
    assert (found.heads, found.kv_heads, found.layers, found.experts) == (12, 4, 6, 8)
    assert found.widths == (("intermediate_size", 96), ("moe_intermediate_size", 48))
    assert sizes(tmp_path, {}) == Sizes(), "of what a file does not say nothing is asked"
    assert sizes(tmp_path, {"num_attention_heads": 3}).kv_heads == 3
    assert sizes(tmp_path, {"num_experts": 1}).experts == 0


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (DENSE, (4, 1, False), None),
        (DENSE, (12, 6, False), None),
        (DENSE, (5, 1, False), r"tensor_parallel_size 5: .* num_attention_heads \(12\); 4 does"),
        (DENSE, (6, 1, False), r"tensor_parallel_size 6: .* num_key_value_heads \(4\) or be a multiple of it; 4 does"),
        (
            DENSE | {"intermediate_size": 90},
            (4, 1, False),
            r"tensor_parallel_size 4: .* intermediate_size \(90\); 3 does",
        ),
        (EXPERTS | {"moe_intermediate_size": 50}, (4, 1, False), r"moe_intermediate_size \(50\); 2 does"),
        (EXPERTS | {"moe_intermediate_size": 50}, (4, 1, True), None),
        (DENSE, (1, 7, False), r"pipeline_parallel_size 7: the model has 6 layers"),
        (DENSE, (2, 1, True), r"rollout\.engine: enable_expert_parallel .* the model has none"),
        ({}, (7, 9, False), None),
    ],
)
def test_an_engine_s_layout(tmp_path: Path, config: dict, layout: tuple[int, int, bool], message: str | None):
    told(lambda: check_engine(sizes(tmp_path, config), *layout), message)


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (DENSE, (2, 3, None, 1), None),
        (DENSE, (5, 1, None, 1), r"update\.parallel\.tensor 5: .* num_attention_heads \(12\); 4 does"),
        (DENSE, (6, 1, None, 1), r"update\.parallel\.tensor 6: .* num_key_value_heads \(4\)"),
        (DENSE, (1, 4, None, 1), r"update\.parallel\.pipeline 4: .* num_hidden_layers \(6\); 3 does"),
        (DENSE, (1, 3, 2, 1), None),
        (
            DENSE,
            (1, 2, 2, 1),
            r"update\.parallel\.virtual 2: with update\.parallel\.pipeline 2 .* num_hidden_layers \(6\)",
        ),
        (DENSE, (1, 1, None, 2), r"update\.parallel\.expert 2 .* the model has none: use 1"),
        (EXPERTS, (2, 1, None, 4), None),
        (EXPERTS, (1, 1, None, 3), r"update\.parallel\.expert 3: .* num_experts \(8\); 2 does"),
    ],
)
def test_a_trainer_s_layout(tmp_path: Path, config: dict, layout: tuple, message: str | None):
    told(lambda: check_trainer(sizes(tmp_path, config), *layout), message)


def told(check, message: str | None) -> None:
    if message is None:
        check()
    else:
        with pytest.raises(BadInput, match=message):
            check()
