"""What the rollout task runs inside the engine's process: read prompts, sample, commit the rollouts."""

import time
from typing import TYPE_CHECKING

import pyarrow as pa

from infra.config import Config
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, open_artifact
from tasks.rollout.episodes.play import Episodes, play

if TYPE_CHECKING:
    from tasks.rollout.engine import RolloutEngine


class SamplingRequest(Config):
    """What is to be sampled."""

    dataset: ArtifactRef
    """Of kind `dataset`."""
    split: str
    """Its table: train or heldout."""
    rows: list[int]
    """The prompts, as rows of the split."""
    samples: int
    """Responses for each prompt."""
    seed: int
    """Each response's own seed is made of this, its prompt's id and its number."""
    temperature: float
    """0 is greedy."""
    episodes: Episodes | None = None
    """How an interactive environment's prompts are played; None: one reply each."""


def generate(engine: "RolloutEngine", stage: Stage, request: SamplingRequest) -> ArtifactRef:
    """Sample what is asked for and commit it as one artifact."""
    if done := stage.committed():  # the reply of a call before this one was lost
        return done
    prompts = open_artifact(request.dataset).table(request.split).take(request.rows)
    started = time.perf_counter()
    samples, seed, temperature = request.samples, request.seed, request.temperature
    if request.episodes is None:
        rollouts, stats = engine.sample(prompts, samples=samples, seed=seed, temperature=temperature)
    else:
        rollouts, stats = play(engine, prompts, request.episodes, samples=samples, seed=seed, temperature=temperature)
    seconds = time.perf_counter() - started
    waited = {name: stats.pop(name) for name in ("environment_s",) if name in stats}  # a time is no content
    with stage.write(
        "rollout",
        metadata={"policy": engine.version, "tokens": tokens_of(rollouts), **stats},
        provenance={"engine_s": seconds, **waited},
    ) as writer:
        writer.table("rollouts", rollouts)
    return writer.ref


def tokens_of(rollouts: pa.Table) -> int:
    """Prompt and response tokens, a prompt counted for each of its samples (as trainers count them)."""
    columns = [rollouts[name].combine_chunks() for name in ("prompt_ids", "response_ids")]
    return sum(len(column.flatten()) for column in columns)
