"""The policy update: one optimizer step on a scored batch, applied once whatever happens."""

from infra.engines.engine import Engine
from infra.engines.spec import EngineSpec
from infra.orchestration.stage_task import stage_task
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef
from tasks.update import resident
from tasks.update.resident import ResidentTrainer


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
    engine: EngineSpec[ResidentTrainer],
    *,
    parent: ArtifactRef,
    scored: ArtifactRef,
    checkpoint: bool,
    timeout_s: float | None,
) -> ArtifactRef:
    """Artifact of kind `update`, with inputs (parent update, scored batch) and the step's metrics as metadata."""
    if done := stage.committed():
        return done
    return Engine(engine, parent, timeout_s).call(resident.update, stage=stage, scored=scored, checkpoint=checkpoint)


@stage_task("warm start")
def warm_start_policy(
    stage: Stage,
    engine: EngineSpec[ResidentTrainer],
    *,
    parent: ArtifactRef,
    demonstrations: ArtifactRef,
    timeout_s: float | None,
) -> ArtifactRef:
    """Artifact of kind `update`, with inputs (parent update, demonstrations): the supervised steps, all in one."""
    if done := stage.committed():
        return done
    return Engine(engine, parent, timeout_s).call(resident.update, stage=stage, scored=demonstrations, checkpoint=True)


@stage_task("checkpoint")
def finish_checkpoint(
    stage: Stage, engine: EngineSpec[ResidentTrainer], *, update: ArtifactRef, timeout_s: float | None
) -> None:
    """Wait until the checkpoint that was being written in the background is in the store."""
    Engine(engine, update, timeout_s).call(resident.finish)
