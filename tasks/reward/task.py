"""Reward scoring: rollouts become a scored batch with rewards, advantages and loss masks."""

import time

from infra.orchestration.stage_task import stage_task
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, open_artifact
from tasks.reward.config import RewardConfig


@stage_task("reward")
def score_rollouts(
    stage: Stage, config: RewardConfig, *, rollouts: ArtifactRef, dataset: ArtifactRef, split: str
) -> ArtifactRef:
    """Artifact of kind `scored`: scored.parquet (schema SCORED), with the reward metrics as metadata."""
    from tasks.reward.scoring import score

    if done := stage.committed():
        return done
    prompts = open_artifact(dataset).table(f"{split}")
    table = open_artifact(rollouts).table("rollouts")
    started = time.perf_counter()
    scored, metrics = score(table, prompts, config)
    seconds = time.perf_counter() - started
    with stage.write("scored", metadata={"metrics": metrics}, provenance={"engine_s": seconds}) as writer:
        writer.table("scored", scored)
    return writer.ref


def check_reward(config: RewardConfig, dataset: ArtifactRef, *splits: str) -> None:
    """Raises BadInput when the environment's reward cannot use the dataset's answers, or has no part of a weight's name."""
    from tasks.reward import scoring

    for split in splits:
        scoring.check_reward(open_artifact(dataset).table(split), config, f"dataset {dataset.uri}, split {split}")
