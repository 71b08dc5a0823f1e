"""MLflow's model registry: versions with their lineage, and the alias that says which one serves."""

import logging
from typing import Any

from infra.config import Config
from infra.errors import BadInput
from infra.storage.artifacts import ArtifactRef

MODEL_TAG = "policyflow.model"


class Registered(Config):
    """A version of a registered model."""

    name: str
    """The registered model."""
    version: str
    """MLflow's number of the version."""
    tags: dict[str, str] = {}
    """Its lineage."""


def check_model_name(folder: str) -> str:
    """A model folder's name as the registered model's. BadInput, before anything is made for it, where MLflow takes it not."""
    if not folder.strip(" .") or any(character in folder for character in "/:'\"") or not folder.isprintable():
        raise BadInput(f"name: MLflow has no registered model called {folder!r}, as the run's model is: set name")
    return folder


def register(
    uri: str, name: str, *, source: str, model: ArtifactRef, mlflow_run: str | None, tags: dict[str, str]
) -> Registered:
    """A version of `name` whose source is the model folder `source`. The same artifact is registered once.

    Raises MlflowException when the registry does not take it (a server, unlike a database, refuses file:// sources).
    """
    client = _client(uri)
    if not client.search_registered_models(f"name = '{name}'", max_results=1):
        client.create_registered_model(name)
    digest = model.digest
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.tags.get(MODEL_TAG) == digest:
            return Registered(name=name, version=str(version.version), tags=version.tags)
    tags = {**tags, MODEL_TAG: digest}
    version = client.create_model_version(name, source=source, run_id=mlflow_run, tags=tags)
    return Registered(name=name, version=str(version.version), tags=tags)


def holder(uri: str, name: str, alias: str) -> Registered | None:
    """The version that has the alias, None when none has."""
    from mlflow.exceptions import MlflowException

    try:
        version = _client(uri).get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
    return Registered(name=name, version=str(version.version), tags=version.tags)


def promote(uri: str, registered: Registered, alias: str) -> None:
    """Give the alias to the version; whoever had it loses it."""
    _client(uri).set_registered_model_alias(registered.name, alias, registered.version)


def annotate(uri: str, registered: Registered, tags: dict[str, str]) -> None:
    """Add tags to a version, e.g. what its evaluation found."""
    client = _client(uri)
    for key, value in tags.items():
        client.set_model_version_tag(registered.name, registered.version, key, value)


def _client(uri: str) -> Any:
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)
