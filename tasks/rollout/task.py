"""Rollout generation: prompts of a dataset and a policy version become sampled responses."""

from collections.abc import Iterable

from infra.actors import Engine, EngineSpec
from infra.artifacts import ArtifactRef, open_artifact
from infra.run import Stage
from infra.stages import stage_task
from tasks.rollout.config import RolloutConfig


@stage_task("rollout")
def generate_rollouts(
    stage: Stage,
    engine: EngineSpec,
    *,
    dataset: ArtifactRef,
    policy: ArtifactRef,
    split: str,
    rows: list[int],
    samples: int,
    seed: int,
    temperature: float,
    timeout_s: float | None,
) -> ArtifactRef:
    """Artifact of kind `rollout`: rollouts.parquet (schema ROLLOUT), `samples` for each of `rows` of the split."""
    if done := stage.committed():
        return done
    return Engine(engine).call(
        "tasks.rollout.generate:generate",
        version=policy,
        timeout_s=timeout_s,
        stage=stage,
        dataset=dataset,
        split=split,
        rows=rows,
        samples=samples,
        seed=seed,
        temperature=temperature,
    )


def check_lengths(
    config: RolloutConfig, model: str, dataset: ArtifactRef, split: str, calls: Iterable[list[int]]
) -> int:
    """How many prompts of the split are too long and will be dropped; BadInput when of a call's rows none would be left."""
    from tasks.rollout.lengths import too_long

    return too_long(config, model, open_artifact(dataset).table(split), calls, f"dataset {dataset.uri}, split {split}")
