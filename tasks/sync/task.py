"""Weight sync: the policy after an update becomes a version in the store, and every engine acknowledges it."""

from concurrent.futures import ThreadPoolExecutor

from infra.actors import Engine, EngineSpec
from infra.artifacts import ArtifactRef, open_artifact
from infra.run import Stage
from infra.stages import stage_task
from tasks.sync.config import SyncConfig
from tasks.sync.verify import ProbeResult, busy_seconds, compare, compare_fresh, probe_sequences


@stage_task("publish")
def publish_policy(
    stage: Stage,
    trainer: EngineSpec,
    config: SyncConfig,
    *,
    update: ArtifactRef,
    parent: ArtifactRef | None,
    timeout_s: float | None,
) -> ArtifactRef:
    """Artifact of kind `policy`: the version after `update`, every tensor with its digest; a delta to `parent`."""
    if done := stage.committed():
        return done
    publish = Engine(trainer).call
    return publish(
        "tasks.sync.publish:publish", version=update, timeout_s=timeout_s, stage=stage, config=config, parent=parent
    )


@stage_task("sync")
def sync_engine(
    stage: Stage,
    engine: EngineSpec,
    trainer: EngineSpec,
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
    probe = {"function": "tasks.sync.verify:score", "sequences": probe_sequences(config, vocab_size)}
    if done := stage.committed():
        Engine(engine).call(version=policy, timeout_s=timeout_s, **probe)
        return done
    with ThreadPoolExecutor(1) as pool:  # the trainer scores while the engine reads and applies the version
        trained = pool.submit(Engine(trainer).call, version=update, timeout_s=timeout_s, **probe)
        engine_scores, engine_span = Engine(engine).call(version=policy, timeout_s=timeout_s, **probe)
        trainer_scores, trainer_span = trained.result()
    result = compare(trainer_scores, engine_scores, config)
    seconds = {"engine_s": busy_seconds([engine_span, trainer_span])}
    with stage.write(
        "ack", metadata={"probe_max_diff": result.max_diff, "probe_mean_diff": result.mean_diff}, provenance=seconds
    ) as writer:
        writer.json("probe", result.model_dump())
    return writer.ref


@stage_task("verify")
def verify_against_fresh_engine(
    stage: Stage, fresh: EngineSpec, config: SyncConfig, *, policy: ArtifactRef, ack: ArtifactRef, vocab_size: int
) -> ArtifactRef:
    """Artifact of kind `verification`: an engine loaded afresh with the version gives the updated engine's logprobs.

    The updated engine went through every sync of the run, the fresh one through none: any weight that an update in
    place did not reach shows here. Raises SyncMismatch unless the logprobs are equal; on a GPU, where the same sums may be
    added up in another order, near.
    """
    if done := stage.committed():
        return done
    updated = ProbeResult.model_validate(open_artifact(ack).json("probe")).engine
    engine = Engine(fresh)
    try:
        loaded, _ = engine.call(
            "tasks.sync.verify:score", version=policy, sequences=probe_sequences(config, vocab_size)
        )
    finally:
        engine.stop()
    result = compare_fresh(loaded, updated, config)
    with stage.write("verification", metadata={"max_diff": result.max_diff}) as writer:
        pass
    return writer.ref
