"""What the rollout task runs inside the engine's process: read prompts, sample, commit the rollouts."""

import time
from typing import TYPE_CHECKING

import pyarrow as pa

from infra.artifacts import ArtifactRef, open_artifact
from infra.run import Stage

if TYPE_CHECKING:
    from tasks.rollout.engine import RolloutEngine


def generate(
    engine: "RolloutEngine",
    stage: Stage,
    dataset: ArtifactRef,
    split: str,
    rows: list[int],
    samples: int,
    seed: int,
    temperature: float,
) -> ArtifactRef:
    """Sample `samples` responses for each of `rows` of the dataset's split and commit them as one artifact."""
    if done := stage.committed():  # the reply of a call before this one was lost
        return done
    prompts = open_artifact(dataset).table(f"{split}").take(rows)
    started = time.perf_counter()
    rollouts, stats = engine.sample(prompts, samples=samples, seed=seed, temperature=temperature)
    seconds = time.perf_counter() - started
    with stage.write(
        "rollout",
        metadata={"policy": engine.version, "tokens": tokens_of(rollouts), **stats},
        provenance={"engine_s": seconds},
    ) as writer:
        writer.table("rollouts", rollouts)
    return writer.ref


def tokens_of(rollouts: pa.Table) -> int:
    """Prompt and response tokens, a prompt counted for each of its samples (as trainers count them)."""
    columns = [rollouts[name].combine_chunks() for name in ("prompt_ids", "response_ids")]
    return sum(len(column.flatten()) for column in columns)
