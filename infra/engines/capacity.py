"""Whether what engines reserve is there at all: Ray lets an actor that fits on no node wait without a word."""

import os
from collections.abc import Sequence
from typing import Any

from infra.engines.cluster import start_ray, stop_ray
from infra.engines.spec import EngineSpec
from infra.errors import BadInput

Resources = dict[str, float]
"""Ray's names: CPU (cores), GPU, memory (bytes)."""


def require_room(engines: Sequence[EngineSpec[Any]]) -> None:
    """Raises BadInput unless the cluster at RAY_ADDRESS, or this machine, could hold `engines` at the same time, were nothing
    else on it. Nodes that an autoscaler might add do not count.

    Engines that reserve neither GPUs nor memory fit anywhere; for others Ray is started.
    """
    if not any(engine.gpus or engine.memory_gib for engine in engines):
        return
    import ray

    start_ray()
    nodes = {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    if fits(list(nodes.values()), [engine.reservation() for engine in engines]):
        return
    stop_ray()
    wanted = " and ".join(f"{engine.name.rpartition('/')[2]} {_amount(engine.reservation())}" for engine in engines)
    raise BadInput(f"resources: {wanted} are to run at the same time, but {_described(nodes)}")


def fits(nodes: list[Resources], needs: list[Resources]) -> bool:
    """Whether each of `needs` finds a node with as much left: all placements are tried, engines are few."""
    if not needs:
        return True
    first, *rest = needs
    for i, node in enumerate(nodes):
        left = {name: node.get(name, 0.0) - amount for name, amount in first.items()}
        if min(left.values()) >= 0 and fits([*nodes[:i], left, *nodes[i + 1 :]], rest):
            return True
    return False


def _described(nodes: dict[str, Resources]) -> str:
    if not os.environ.get("RAY_ADDRESS"):
        return f"this machine has {' + '.join(map(_amount, nodes.values()))}"
    return "the Ray cluster has " + (
        ", ".join(f"{_amount(node)} on {name}" for name, node in nodes.items()) or "no node"
    )


def _amount(resources: Resources) -> str:
    return f"{resources.get('GPU', 0):g} GPUs, {resources.get('memory', 0) / 2**30:.1f} GiB"
