"""Dataset preparation: a source becomes an immutable artifact of prompts, split into train and held-out."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.orchestration.stage_task import stage_task
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, open_artifact
from tasks.dataset.config import DatasetConfig

if TYPE_CHECKING:
    import pyarrow as pa


@stage_task("dataset")
def prepare_dataset(stage: Stage, config: DatasetConfig, model: str | None = None) -> ArtifactRef:
    """Artifact of kind `dataset`: tables train.parquet and heldout.parquet (schema PROMPT).

    `model` is the folder whose tokenizer counts for `max_prompt_tokens`; not needed without that. The artifact's key is
    made from the prompts themselves: a file whose content has changed is another dataset under the same settings.
    """
    from infra.storage.schemas import compact
    from tasks.dataset.prepare import length_in_tokens, prepare

    length = None
    if model is not None and config.max_prompt_tokens is not None:
        from transformers import AutoTokenizer

        length = length_in_tokens(AutoTokenizer.from_pretrained(model))
    prepared = prepare(config, length)
    train, heldout = compact(prepared.train), compact(prepared.heldout)
    content = content_digest(train, heldout)
    stage = stage.model_copy(update={"settings": f"{stage.settings}:{content}"})
    if done := stage.committed():
        return done
    counts = {"train": train.num_rows, "heldout": heldout.num_rows}
    with stage.write("dataset", metadata={"prompts": counts, "dropped": prepared.dropped}) as writer:
        writer.table("train", train)
        writer.table("heldout", heldout)
    return writer.ref


@stage_task("demonstrations")
def commit_demonstrations(stage: Stage, *, dataset: ArtifactRef, settings: dict[str, Any]) -> ArtifactRef:
    """Artifact of kind `demonstrations`: the train prompts with their environment's solutions, and how to learn from them."""
    from infra.storage.schemas import compact
    from tasks.dataset.demonstrate import demonstrate

    if done := stage.committed():
        return done
    table = compact(demonstrate(open_artifact(dataset).table("train")))
    with stage.write("demonstrations", metadata={"settings": settings}) as writer:
        writer.table("demonstrations", table)
    return writer.ref


def check_demonstrations(demonstrations: ArtifactRef, model: str) -> None:
    """Raises BadInput for a solution with a token that the model has not."""
    from tasks.dataset.demonstrate import check_tokens

    check_tokens(open_artifact(demonstrations).table("demonstrations"), Path(model))


def content_digest(*tables: "pa.Table") -> str:
    """sha256 (hex) of the tables' rows, in order."""
    digest = hashlib.sha256()
    for table in tables:
        for batch in table.to_batches():
            digest.update(json.dumps(batch.to_pylist(), sort_keys=True).encode())
        digest.update(b"end")
    return digest.hexdigest()
