"""Rollout generation: prompts of a dataset and a policy version become sampled responses."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from infra.engines.engine import Engine
from infra.engines.spec import EngineSpec
from infra.orchestration.stage_task import stage_task
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, open_artifact
from tasks.rollout.config import RolloutConfig
from tasks.rollout.generate import SamplingRequest, generate

if TYPE_CHECKING:
    from tasks.rollout.engine import RolloutEngine


@stage_task("rollout")
def generate_rollouts(
    stage: Stage,
    engine: "EngineSpec[RolloutEngine]",
    request: SamplingRequest,
    *,
    policy: ArtifactRef,
    timeout_s: float | None,
) -> ArtifactRef:
    """Artifact of kind `rollout`: rollouts.parquet (schema ROLLOUT), of the policy version, as the request says."""
    if done := stage.committed():
        return done
    return Engine(engine, policy, timeout_s).call(generate, stage, request)


def check_lengths(
    config: RolloutConfig, model: str, dataset: ArtifactRef, split: str, calls: Iterable[list[int]]
) -> int:
    """How many prompts of the split are too long and will be dropped; BadInput when of a call's rows none would be left."""
    from tasks.rollout.lengths import too_long

    return too_long(config, model, open_artifact(dataset).table(split), calls, f"dataset {dataset.uri}, split {split}")
