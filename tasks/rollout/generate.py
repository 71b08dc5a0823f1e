"""What the rollout task runs inside the engine's process: read prompts, sample, commit the rollouts."""

import time
from typing import TYPE_CHECKING

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
        "rollout", metadata={"policy": engine.version, **stats}, provenance={"engine_s": seconds}
    ) as writer:
        writer.table("rollouts", rollouts)
    return writer.ref
