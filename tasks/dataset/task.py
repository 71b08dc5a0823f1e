"""Dataset preparation: a source becomes an immutable artifact of prompts, split into train and held-out."""

from infra.artifacts import ArtifactRef
from infra.run import Stage
from infra.stages import stage_task
from tasks.dataset.config import DatasetConfig


@stage_task("dataset")
def prepare_dataset(stage: Stage, config: DatasetConfig) -> ArtifactRef:
    """Artifact of kind `dataset`: tables train.parquet and heldout.parquet (schema PROMPT)."""
    from tasks.dataset.prepare import prepare

    if done := stage.committed():
        return done
    prepared = prepare(config)
    counts = {"train": prepared.train.num_rows, "heldout": prepared.heldout.num_rows}
    with stage.write("dataset", metadata={"prompts": counts, "dropped": prepared.dropped}) as writer:
        writer.table("train", prepared.train)
        writer.table("heldout", prepared.heldout)
    return writer.ref
