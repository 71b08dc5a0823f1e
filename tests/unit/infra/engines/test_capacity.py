"""What engines reserve is there, or is refused before anything starts."""

from typing import Any
from unittest import mock

import pytest
import ray

from infra.engines import capacity
from infra.engines.capacity import fits, require_room
from infra.engines.spec import EngineSpec
from infra.errors import BadInput

GIB = 2.0**30
BIG = {"CPU": 64.0, "GPU": 8.0, "memory": 800 * GIB}
HEAD = {"CPU": 0.0, "memory": 16 * GIB}


def engine(name: str, gpus: float = 0, memory_gib: float | None = None) -> EngineSpec[Any]:
    return EngineSpec(name=f"run/{name}", loader=mock.Mock(), gpus=gpus, memory_gib=memory_gib)


@pytest.mark.parametrize(
    ("nodes", "needs", "possible"),
    [
        ([BIG], [(4, 200), (4, 400)], True),
        ([BIG], [(4, 200), (5, None)], False),
        ([BIG], [(4, 500), (4, 400)], False),
        ([HEAD, BIG], [(8, None)], True),
        ([HEAD], [(0, 8)], False),  # it has no cores for engines
        ([BIG, BIG], [(8, None), (8, None)], True),
        ([BIG, BIG], [(16, None)], False),  # an engine is on one node
        ([{"CPU": 8.0, "memory": 24 * GIB}], [(0, 12), (0, 12)], True),
        ([{"CPU": 8.0, "memory": 24 * GIB}], [(0, 12), (0, 12.1)], False),
        # the first engine must not take the only node that the second one fits on
        ([BIG, BIG | {"GPU": 4.0}], [(4, None), (8, None)], True),
        ([], [(1, None)], False),
    ],
)
def test_engines_fit_when_each_has_a_node(nodes: list, needs: list, possible: bool):
    reservations = [engine("e", gpus, memory).reservation() for gpus, memory in needs]
    assert fits(nodes, reservations) is possible


@pytest.fixture
def cluster(monkeypatch) -> list[str]:
    """Ray's answer, of a head and a node with 8 GPUs; the value is what was done."""
    done: list[str] = []
    nodes = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": HEAD},
        {"Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": BIG},
        {"Alive": False, "NodeManagerAddress": "10.0.0.3", "Resources": BIG},
    ]
    monkeypatch.setattr(capacity, "start_ray", lambda: done.append("start"))
    monkeypatch.setattr(capacity, "stop_ray", lambda: done.append("stop"))
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    return done


def test_what_no_node_can_give_is_refused_with_what_there_is(cluster: list[str]):
    with pytest.raises(BadInput) as refused:
        require_room([engine("rollout", 8), engine("trainer", 4, 256)])
    assert str(refused.value) == (
        "resources: rollout 8 GPUs, 0.0 GiB and trainer 4 GPUs, 256.0 GiB are to run at the same time, but the Ray cluster "
        "has 0 GPUs, 16.0 GiB on 10.0.0.1, 8 GPUs, 800.0 GiB on 10.0.0.2"
    )
    assert cluster == ["start", "stop"]


def test_what_fits_passes_and_leaves_ray_for_the_engines(cluster: list[str]):
    require_room([engine("rollout", 4), engine("trainer", 4, 256)])
    assert cluster == ["start"]


def test_engines_that_reserve_nothing_start_no_ray(cluster: list[str]):
    require_room([engine("rollout"), engine("trainer")])
    assert cluster == []
