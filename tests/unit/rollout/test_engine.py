"""What the engine decides before and after vLLM: seeds, routes, and which models have experts."""

import json
from pathlib import Path

import numpy as np
import pytest

from infra.records import unpack_routes
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import has_experts, routes_columns, sample_seed


def test_every_response_has_a_seed_of_its_own():
    seeds = {sample_seed(seed, prompt, sample) for seed in range(3) for prompt in ("a", "b") for sample in range(8)}
    assert len(seeds) == 48 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(5, "p1", 0) == 682802186402935722, "a resumed run must draw what the interrupted one drew"


def test_the_last_sampled_token_has_no_route():
    routes = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)
    unpacked = unpack_routes(routes_columns(routes, tokens=5))
    assert unpacked is not None
    values, mask = unpacked
    assert mask.tolist() == [True, True, True, True, False]
    assert np.array_equal(values[:4], routes)


@pytest.mark.parametrize("routes", [None, np.zeros((3, 2, 2), np.uint8)], ids=["absent", "short"])
def test_routes_that_were_not_recorded_are_an_error_not_zeros(routes: np.ndarray | None):
    with pytest.raises(RuntimeError, match="recorded routes of"):
        routes_columns(routes, tokens=5)


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


def test_every_setting_explains_itself():
    assert all(field.description for field in RolloutConfig.model_fields.values())
