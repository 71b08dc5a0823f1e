"""Weight sync: the policy after an update becomes a version in the store, and every engine acknowledges it."""

from concurrent.futures import ThreadPoolExecutor

from infra.engines.engine import Engine
from infra.engines.spec import EngineSpec
from infra.orchestration.stage_task import stage_task
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, open_artifact
from tasks.sync.commit import PolicySource, commit
from tasks.sync.config import SyncConfig
from tasks.sync.verify import ProbeResult, Scorer, busy_seconds, compare, compare_fresh, probe_sequences, score


@stage_task("commit")
def commit_policy(
    stage: Stage,
    trainer: EngineSpec[PolicySource],
    config: SyncConfig,
    *,
    update: ArtifactRef,
    parent: ArtifactRef | None,
    timeout_s: float | None,
) -> ArtifactRef:
    """Artifact of kind `policy`: the version after `update`, every tensor with its digest; a delta to `parent`."""
    if done := stage.committed():
        return done
    return Engine(trainer, update, timeout_s).call(commit, stage=stage, config=config, parent=parent)


@stage_task("sync")
def sync_engine(
    stage: Stage,
    engine: EngineSpec[Scorer],
    trainer: EngineSpec[Scorer],
    config: SyncConfig,
    *,
    update: ArtifactRef,
    policy: ArtifactRef,
    vocab_size: int,
    timeout_s: float | None,
) -> ArtifactRef:
    """Artifact of kind `ack`: the engine holds the version and agrees with the trainer on the probe.

    An engine that is not at the version (a new one, say) is brought there even if the acknowledgement is committed.
    """
    served, trained = Engine(engine, policy, timeout_s), Engine(trainer, update, timeout_s)
    sequences = probe_sequences(config, vocab_size)
    if done := stage.committed():
        served.call(score, sequences)
        return done
    with ThreadPoolExecutor(1) as pool:  # the trainer scores while the engine reads and applies the version
        by_trainer = pool.submit(lambda: trained.call(score, sequences))
        engine_scores, engine_span = served.call(score, sequences)
        trainer_scores, trainer_span = by_trainer.result()
    result = compare(trainer_scores, engine_scores, config)
    seconds = {"engine_s": busy_seconds([engine_span, trainer_span])}
    with stage.write(
        "ack", metadata={"probe_max_diff": result.max_diff, "probe_mean_diff": result.mean_diff}, provenance=seconds
    ) as writer:
        writer.json("probe", result.model_dump())
    return writer.ref


@stage_task("verify")
def verify_against_fresh_engine(
    stage: Stage,
    fresh: EngineSpec[Scorer],
    config: SyncConfig,
    *,
    policy: ArtifactRef,
    ack: ArtifactRef,
    vocab_size: int,
) -> ArtifactRef:
    """Artifact of kind `verification`: an engine loaded afresh with the version gives the updated engine's logprobs.

    The updated engine went through every sync of the run, the fresh one through none: any weight that an update in
    place did not reach shows here. Raises SyncMismatch unless the logprobs are equal; on a GPU, where the same sums may be
    added up in another order, near.
    """
    if done := stage.committed():
        return done
    updated = ProbeResult.model_validate(open_artifact(ack).json("probe")).engine
    engine = Engine(fresh, policy)
    try:
        loaded, _ = engine.call(score, probe_sequences(config, vocab_size))
    finally:
        engine.stop()
    result = compare_fresh(loaded, updated, config)
    with stage.write("verification", metadata={"max_diff": result.max_diff}) as writer:
        pass
    return writer.ref
