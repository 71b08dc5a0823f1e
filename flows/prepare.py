"""The prepare flow: a source of problems becomes a dataset artifact."""

import re
from typing import Any

from prefect import flow

from flows.session import home
from infra.artifacts import ArtifactRef, open_artifact
from infra.errors import BadInput
from infra.models.catalog import prepare_model
from infra.run import Stage
from infra.store import Store
from tasks.dataset.config import DatasetConfig
from tasks.dataset.task import prepare_dataset


@flow(name="prepare", persist_result=False)
def prepare(dataset: DatasetConfig, store: str = "outputs/store", model: str | None = None) -> dict[str, Any]:
    """Prepare a dataset; returns its ref. `model` is needed for `max_prompt_tokens` only."""
    folder = None if model is None else str(prepare_model(model, home() / "models"))
    return dataset_of(Store.at(store).url, dataset, folder).model_dump()


def dataset_of(store: str, config: DatasetConfig, model: str | None = None) -> ArtifactRef:
    """The dataset that the settings describe, prepared if it is not in the store; runs share it."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", config.environment.rstrip("/").rpartition("/")[2])
    stage = Stage(store=store, folder="datasets", name=name, settings=config.digest())
    return prepare_dataset(stage, config, model)


def split_size(dataset: ArtifactRef, split: str) -> int:
    """Prompts in a split of the dataset. Raises BadInput for a split that it does not have, or an empty one."""
    counts = open_artifact(dataset).metadata["prompts"]
    if not counts.get(split):
        raise BadInput(f"dataset {dataset.uri}: no prompts in split {split!r}; it has {counts}")
    return counts[split]
