"""Rollout generation: prompts of a dataset and a policy version become sampled responses."""

from infra.actors import Engine, EngineSpec
from infra.artifacts import ArtifactRef
from infra.run import Stage
from infra.stages import stage_task


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
