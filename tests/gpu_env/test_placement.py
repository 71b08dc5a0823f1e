"""The engines of each GPU profile find a place on the machine that the profile names, by Ray's own scheduler and by our check."""

from typing import Any

import pytest
import ray

from flows.settings import load_config
from infra.engines.capacity import fits

MEMORY = 1800 * 2**30
"""Of a machine with eight GPUs; Ray counts what it is told."""
PROFILES = {"smollm2-gpu": 2, "beam-lora": 8, "beam-bf16": 8, "beam-mxfp8": 8}
"""GPUs of each."""


@ray.remote
class Engine:
    def here(self) -> bool:
        return True


def needs_of(profile: str) -> list[dict[str, float]]:
    resources = load_config(profile).resources
    sizes = [
        (resources.rollout_gpus, resources.rollout_memory_gib),
        (resources.update_gpus, resources.update_memory_gib),
    ]
    return [{"CPU": 1.0, "GPU": float(gpus), "memory": int((memory or 0) * 2**30)} for gpus, memory in sizes]


def placed(needs: list[dict[str, float]]) -> int:
    """How many of the engines Ray starts, on the machine that it was told of."""
    actors: list[Any] = [
        Engine.options(num_cpus=need["CPU"], num_gpus=need["GPU"], memory=need["memory"]).remote() for need in needs
    ]
    ready, _ = ray.wait([actor.here.remote() for actor in actors], num_returns=len(actors), timeout=30)
    return len(ready)


@pytest.mark.parametrize(("profile", "missing"), [*((name, 0) for name in PROFILES), ("beam-bf16", 1)])
def test_a_profiles_engines_are_placed(profile: str, missing: int):
    gpus = PROFILES[profile] - missing
    ray.init("local", num_cpus=4, num_gpus=gpus, _memory=MEMORY, include_dashboard=False, log_to_driver=False)
    try:
        (node,) = [node["Resources"] for node in ray.nodes()]
        assert fits([node], needs_of(profile)) is not bool(missing)
        assert placed(needs_of(profile)) == 2 - missing
    finally:
        ray.shutdown()
