"""The prepare flow: a source of problems becomes a dataset artifact, and whoever waits for it is told."""

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from environments import environment_reference, refers_to, short_name
from flows.reporting import report
from flows.reporting.failures import tell_failure
from flows.session import home
from infra.config import URL, Name
from infra.errors import BadInput
from infra.models.catalog import prepare_model
from infra.orchestration.assets import record_asset
from infra.orchestration.credentials import use_credentials
from infra.orchestration.events import DatasetReady, emit
from infra.orchestration.progress import speaker
from infra.runs.run import Run
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, open_artifact
from infra.storage.store import Store
from tasks.dataset.config import DatasetConfig
from tasks.dataset.task import prepare_dataset
from tasks.reward.config import RewardConfig
from tasks.reward.task import check_reward


@flow(
    name="prepare",
    flow_run_name="prepare {dataset.environment}",
    persist_result=False,
    on_failure=[tell_failure],
    on_crashed=[tell_failure],
    on_cancellation=[tell_failure],
)
def prepare(
    dataset: DatasetConfig,
    store: URL = "outputs/store",
    name: Name | None = None,
    model: str | None = None,
    credentials: str | None = None,
) -> dict[str, Any]:
    """Prepare a dataset and emit `dataset.ready`; returns its ref.

    Args:
        dataset: Where prompts come from, and how they are split.
        store: Root of the artifact store: a folder or s3://bucket/prefix.
        name: What the event calls the dataset, for triggers to match on. Null: the environment's name.
        model: Whose tokenizer counts for `max_prompt_tokens`; not needed without that.
        credentials: Name of a Prefect Secret block with environment variables. Null: the environment as it is.
    """
    use_credentials(credentials)
    counted = model is not None and dataset.max_prompt_tokens is not None
    folder = str(prepare_model(model, home() / "models")) if counted else None
    ref = dataset_of(Store.at(store).url, dataset, folder)
    check_reward(RewardConfig(), ref, "train")
    announce(ref, name or short_name(dataset.environment), dataset.environment)
    return ref.model_dump()


def announce(ref: ArtifactRef, name: str, environment: str) -> None:
    """The page, the asset and the event of a dataset."""
    artifact = open_artifact(ref)
    counts = artifact.metadata["prompts"]
    speaker()(f"dataset {name}: {counts} prompts, {ref.uri}")
    sample = [report.prompt_text(row) for row in artifact.table("train").slice(0, 8).to_pylist()]
    create_markdown_artifact(
        report.dataset_markdown(name, ref, artifact.metadata, sample),
        key=f"{report.artifact_key(name, ref.digest.rpartition(':')[2][:12])}-dataset",
        description=f"Dataset {name}",
    )
    description = f"Prompts of {environment}: " + ", ".join(f"{n} {split}" for split, n in counts.items())
    record_asset(ref, name=name, description=description, metadata={"prompts": counts, "environment": environment})
    emit(DatasetReady(name=name, environment=environment, dataset=ref, prompts=counts))


def dataset_of(
    store: str, config: DatasetConfig, model: str | None = None, timeout_s: float | None = None
) -> ArtifactRef:
    """The dataset that the settings describe, prepared if it is not in the store; runs share it."""
    stage = Stage(store=store, folder="datasets", name=short_name(config.environment), settings=config.content())
    return prepare_dataset.with_options(timeout_seconds=timeout_s)(stage, config, model)


def run_dataset(
    run: Run, config: DatasetConfig, given: ArtifactRef | None, model: str, timeout_s: float
) -> ArtifactRef:
    """The dataset that a run trains on: the one that it began with, else `given` (an event's), else prepared now.

    Raises BadInput when `given` is no dataset of the environment that the run is for, or another than the run's.
    """
    if given is not None:
        check_dataset(given, config.environment)
    dataset = run.pinned("dataset", lambda: given or dataset_of(run.store, config, model, timeout_s))
    if given is not None and given.digest != dataset.digest:
        raise BadInput(
            f"dataset: run {run.name!r} trains on {dataset.uri}, not on {given.uri}; choose another run name"
        )
    if given is None and (moved := moved_source(run, config)):
        found = dataset_of(run.store, config, model, timeout_s)
        if not same_prompts(found, dataset):
            raise BadInput(
                f"dataset.{moved}: what is at {getattr(config, moved)!r} is not what run {run.name!r} trains on, {dataset.uri}; "
                "choose another run name"
            )
    return dataset


def moved_source(run: Run, config: DatasetConfig) -> str | None:
    """The setting that has the problems elsewhere than the run's start did; None when all are there."""
    began = (run.read_json("run.json") or {}).get("dataset", {})
    return next((name for name in ("path", "heldout_path") if began.get(name) != getattr(config, name)), None)


def same_prompts(one: ArtifactRef, other: ArtifactRef) -> bool:
    """Whether two datasets have equal rows; that both are for the environment of the settings was found otherwise."""
    if one.digest == other.digest:
        return True
    artifacts, splits = [open_artifact(ref) for ref in (one, other)], ("train", "heldout")
    ours, theirs = ([artifact.table(split).drop_columns("environment") for split in splits] for artifact in artifacts)
    return ours == theirs


def check_dataset(dataset: ArtifactRef, environment: str) -> None:
    """Whether an artifact that somebody else names may be trained on.

    A prompt's row says which environment scores it, and environments are code: rows of another environment than the one
    that the settings name are refused.
    """
    from infra.storage.schemas import PROMPT, validate

    if dataset.kind != "dataset":
        raise BadInput(f"dataset: {dataset.uri} is of kind {dataset.kind!r}, expected 'dataset'")
    for split in ("train", "heldout"):
        table = validate(open_artifact(dataset).table(split), PROMPT)
        for found in table["environment"].unique().to_pylist():
            if not refers_to(found, environment):
                raise BadInput(
                    f"dataset: {dataset.uri} is for environment {found!r}, these settings for "
                    f"{environment_reference(environment, {})!r}"
                )


def split_size(dataset: ArtifactRef, split: str) -> int:
    """Prompts in a split of the dataset. Raises BadInput for a split that it does not have, or an empty one."""
    counts = open_artifact(dataset).metadata["prompts"]
    if not counts.get(split):
        raise BadInput(f"dataset {dataset.uri}: no prompts in split {split!r}; it has {counts}")
    return counts[split]
