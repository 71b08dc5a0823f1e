"""Routes as vLLM records them become a rollout's columns, and nothing is replayed that was not recorded."""

import numpy as np
import pytest

from infra.storage.schemas import unpack_routes
from tasks.rollout.routes import expert_layers, routes_columns


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
    names = [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.10.mlp.experts.3.up_proj.weight",
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.shared_expert.up_proj.weight",
    ]
    assert expert_layers(names) == [2, 10]
