"""The policy update: one optimizer step on a scored batch, applied once whatever happens."""

from infra.actors import Engine, EngineSpec
from infra.artifacts import ArtifactRef
from infra.run import Stage
from infra.stages import stage_task


@stage_task("base")
def commit_base(stage: Stage, metadata: dict[str, str | int]) -> ArtifactRef:
    """Artifact of kind `update` without a parent: the model that the run starts from, by its fingerprint."""
    if done := stage.committed():
        return done
    with stage.write("update", metadata=metadata) as writer:
        pass
    return writer.ref


@stage_task("update")
def update_policy(
    stage: Stage,
    engine: EngineSpec,
    *,
    parent: ArtifactRef,
    scored: ArtifactRef,
    checkpoint: bool,
    timeout_s: float | None,
) -> ArtifactRef:
    """Artifact of kind `update`: metrics.json, with inputs (parent update, scored batch)."""
    if done := stage.committed():
        return done
    return Engine(engine).call(
        "tasks.update.resident:update",
        version=parent,
        timeout_s=timeout_s,
        stage=stage,
        scored=scored,
        checkpoint=checkpoint,
    )


@stage_task("warm start")
def warm_start_policy(
    stage: Stage, engine: EngineSpec, *, parent: ArtifactRef, demonstrations: ArtifactRef, timeout_s: float | None
) -> ArtifactRef:
    """Artifact of kind `update`, with inputs (parent update, demonstrations): the supervised steps, all in one."""
    if done := stage.committed():
        return done
    return Engine(engine).call(
        "tasks.update.resident:update",
        version=parent,
        timeout_s=timeout_s,
        stage=stage,
        scored=demonstrations,
        checkpoint=True,
    )


@stage_task("checkpoint")
def finish_checkpoint(stage: Stage, engine: EngineSpec, *, update: ArtifactRef, timeout_s: float | None) -> None:
    """Wait until the checkpoint that was being written in the background is in the store."""
    Engine(engine).call("tasks.update.resident:finish", version=update, timeout_s=timeout_s)
