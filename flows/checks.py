"""What can be wrong with a start, looked at before a Prefect server is started for it: the store, the model, the data.

Nothing is claimed here, and nothing written but a model of the catalog, which is made once. The flows check the same again
where they use it, and what only an engine or the whole dataset can tell: they are also started by a worker, and what was
right may have changed.
"""

import os
from pathlib import Path

from flows.config import PLACES, EvaluateConfig, PublishConfig, TrainConfig
from flows.ideas import check_ideas
from flows.layout import check_layout
from flows.session import contents_of, home
from infra.errors import BadInput
from infra.models.catalog import fingerprint, is_to_be_made, prepare_model
from infra.runs.run import Run
from infra.storage.store import Store
from infra.storage.urls import local_path
from tasks.dataset.config import DatasetConfig
from tasks.reward.config import RewardConfig

ROWS = 50
"""Of each split, the rows that are looked at: a column that is missing is missing in the first."""


def check_train(config: TrainConfig) -> None:
    """Raises BadInput for whatever is wrong with a training run's store, model, name or data.

    With `credentials`, which the Prefect server has, only the model is looked at.
    """
    if not config.credentials:
        check_store(config.store)
    model = model_folder(config.model)
    config.check_model(model)
    check_ideas(config)
    check_layout(config, model)
    if config.credentials:
        return
    if config.run is not None:
        run = Run(store=Store.at(config.store).url, name=config.run)
        run.fits(config.identity() | contents_of(config, fingerprint(model)), PLACES, TrainConfig.defaults())
        if run.read_json("dataset.json") is not None:  # it trains on what it began with
            return
    check_source(config.dataset, config.reward)


def check_prepare(config: TrainConfig) -> None:
    """Raises BadInput for whatever is wrong with the store, the model and the data that a dataset is made from."""
    if not config.credentials:
        check_store(config.store)
    if config.dataset.max_prompt_tokens is not None:
        model_folder(config.model)
    if not config.credentials:
        check_source(config.dataset, RewardConfig())


def check_evaluate(config: EvaluateConfig) -> None:
    """Raises BadInput for whatever is wrong with the version to evaluate, its baseline, its model or the data."""
    if config.credentials:
        return
    from flows.evaluate import versions_of
    from flows.versions import run_config

    check_store(config.store)
    versions_of(config)
    _check_visit(config, run_config(config))


def check_publish(config: PublishConfig) -> None:
    """Raises BadInput for whatever is wrong with the version to publish, its model or the folders that get it."""
    from flows.publish import check_folders, version_of

    check_folders(config)
    if config.credentials:
        return
    check_store(config.store)
    _, settings = version_of(config)
    _check_visit(config, settings)


def _check_visit(config: EvaluateConfig | PublishConfig, settings: TrainConfig) -> None:
    model_folder(settings.model)
    if config.dataset is not None:
        check_source(config.dataset, RewardConfig())


def model_folder(name_or_path: str) -> Path:
    """The model's folder; a model of the catalog is made if need be. Raises BadInput for one that is none."""
    models = home() / "models"
    if is_to_be_made(name_or_path, models):
        print(f"making the model {name_or_path} in {models}, once", flush=True)
    return prepare_model(name_or_path, models)


def check_store(url: str) -> None:
    """Raises BadInput for a store that cannot be read, and for a folder in which nothing can be written."""
    store = Store.at(url)
    if not store.is_local:
        try:
            # Not its size: a reply about the head of nothing does not name a missing bucket.
            store.read("runs/head.json")
        except FileNotFoundError:
            pass
        return
    path = Path(local_path(store.url) or "")
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        raise BadInput(f"store {store.url}: {there} is a file; name a folder")
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise BadInput(f"store {store.url}: {there} may not be written; give this user access or choose another store")


def check_source(config: DatasetConfig, reward: RewardConfig) -> None:
    """Raises BadInput for a dataset whose environment does not load, whose files or columns are not there, or whose first
    answers the reward cannot use."""
    from tasks.dataset.prepare import first_prompts
    from tasks.reward.scoring import check_reward

    for split, prompts in first_prompts(config, ROWS).items():
        check_reward(prompts, reward, f"dataset, split {split}")
