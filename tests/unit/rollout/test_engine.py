"""What the engine decides before and after vLLM: seeds, routes, and which models have experts."""

import json
from pathlib import Path

import numpy as np
import pytest

from infra.errors import BadInput
from infra.records import unpack_routes
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine, expert_layers, has_experts, routes_columns, sample_seed


def test_every_response_has_a_seed_of_its_own():
    seeds = {sample_seed(seed, prompt, sample) for seed in range(3) for prompt in ("a", "b") for sample in range(8)}
    assert len(seeds) == 48 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(5, "p1", 0) == 682802186402935722, "a resumed run must draw what the interrupted one drew"


def recorded(tokens: int) -> np.ndarray:
    """Routes of four layers as vLLM gives them: layer 0 is dense and stays zero."""
    routes = np.zeros((tokens, 4, 2), np.uint8)
    routes[:, 1:] = np.arange(1, 1 + tokens * 6).reshape(tokens, 3, 2)
    return routes


def test_routes_are_those_of_the_layers_with_experts_and_the_last_sampled_token_has_none():
    unpacked = unpack_routes(routes_columns(recorded(4), tokens=5, layers=[1, 2, 3]))
    assert unpacked is not None
    assert unpacked.mask.tolist() == [True, True, True, True, False]
    assert unpacked.layers == (1, 2, 3)
    assert np.array_equal(unpacked.experts[:4], recorded(4)[:, 1:])


def test_a_token_that_was_never_written_is_marked_not_replayed_as_zeros():
    routes = recorded(4)
    routes[2] = 0
    unpacked = unpack_routes(routes_columns(routes, tokens=5, layers=[1, 2, 3]))
    assert unpacked is not None and unpacked.mask.tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("routes", [None, recorded(3), np.zeros((4, 4, 2), np.uint8)], ids=["absent", "short", "zero"])
def test_routes_that_were_not_recorded_are_an_error_not_zeros(routes: np.ndarray | None):
    with pytest.raises(RuntimeError, match="vLLM recorded"):
        routes_columns(routes, tokens=5, layers=[1, 2, 3])


def test_layers_with_experts_are_known_by_the_checkpoints_names():
    names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.10.mlp.experts.3.up_proj.weight",
             "model.layers.2.mlp.experts.gate_up_proj", "model.layers.3.mlp.shared_expert.up_proj.weight"]  # fmt: skip
    assert expert_layers(names) == [2, 10]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"num_experts": 0}, False),
        ({"n_routed_experts": 64}, True),
        ({"text_config": {"num_experts": 8}}, True),
    ],
)
def test_a_model_with_routed_experts_is_known_by_its_config(tmp_path: Path, config: dict, expected: bool):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_experts(str(tmp_path)) is expected


def test_routes_over_pipeline_stages_are_refused_before_anything_is_loaded(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 8}))
    with pytest.raises(BadInput, match=r"pipeline_parallel_size 2.*tensor_parallel_size"):
        RolloutEngine(str(tmp_path), RolloutConfig(pipeline_parallel_size=2))


def test_every_setting_explains_itself():
    assert all(field.description for field in RolloutConfig.model_fields.values())
