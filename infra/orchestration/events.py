"""The events that policyflow emits and listens to: their names, and what their payloads hold.

name                  resource                         when
dataset.ready         data.dataset.<name>              a dataset artifact is committed (also by other pipelines)
policy.committed      policyflow.run.<run>             every engine has acknowledged a new version
evaluation.finished   policyflow.run.<run>             a version has been evaluated
policy.published      policyflow.model.<name>          a version is a model folder and in the registry
policy.promoted       policyflow.model.<name>          a published version has got the alias
run.finished          policyflow.run.<run>             a training run is complete
run.failed            policyflow.run.<run>             a flow run that trained it failed, crashed or was cancelled
evaluation.failed     policyflow.run.<run>             a flow run that evaluated a version of it did
publication.failed    policyflow.run.<run>             a flow run that published a version of it did
dataset.failed        data.dataset.<name>              a flow run that prepared it did
engine.memory         policyflow.run.<run>             the trainer ran out of memory; its microbatch was halved

Payloads are small JSON, never data and never credentials. `python -m infra.orchestration.events` prints their JSON schemas.
"""

import json
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from infra.storage.artifacts import ArtifactRef


class Event(BaseModel):
    """A payload with the event's name. Unknown fields are allowed: a newer sender may know more."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    event: ClassVar[str]
    about: ClassVar[tuple[str, str]]
    """What the id of the event's resource begins with, and the field that ends it."""

    def labels(self) -> dict[str, str]:
        """What else the resource is known by, for triggers to match on."""
        return {}

    def resource(self) -> tuple[str, str]:
        """(id, name) of the resource that the event is about."""
        kind, field = self.about
        name = getattr(self, field)
        return f"{kind}.{name}", name


class DatasetReady(Event):
    """A dataset artifact is committed; a training run can start on exactly it."""

    event: ClassVar[str] = "dataset.ready"
    about: ClassVar[tuple[str, str]] = ("data.dataset", "name")

    name: str
    """The dataset's name; what triggers match on."""
    environment: str
    """The environment that scores its responses."""
    dataset: ArtifactRef
    """The dataset."""
    prompts: dict[str, int] = {}
    """Prompts a split."""


class RunEvent(Event):
    """About a training run."""

    about: ClassVar[tuple[str, str]] = ("policyflow.run", "run")

    run: str
    """The run's name."""
    store: str
    """URL of the store that has it."""

    def labels(self) -> dict[str, str]:
        """Stores have names of runs of their own: a trigger that means one run names its store, too."""
        return {"policyflow.store": self.store}


class PolicyCommitted(RunEvent):
    """A new policy version serves."""

    event: ClassVar[str] = "policy.committed"

    version: int
    """Its number: the policy after so many steps."""
    policy: ArtifactRef
    """The version."""
    reward: float
    """Mean reward of the step's rollouts, which the version before it made."""


class EvaluationFinished(RunEvent):
    """A version has been evaluated."""

    event: ClassVar[str] = "evaluation.finished"

    version: int
    """Its number."""
    evaluation: ArtifactRef
    """The whole result."""
    environment: str
    """What was to be solved."""
    split: str
    """Of the dataset."""
    accuracy: float
    """Mean reward over prompts."""
    low: float
    """Lower end of its interval."""
    high: float
    """Upper end of its interval."""
    gain: float | None = None
    """Accuracy minus the baseline's."""
    gain_low: float | None = None
    """Lower end of the gain's interval."""


class ModelEvent(Event):
    """About a registered model."""

    about: ClassVar[tuple[str, str]] = ("policyflow.model", "name")

    name: str
    """The registered model's name."""
    model_version: str
    """The registry's number."""
    run: str
    """The run that trained it."""
    version: int
    """The policy version."""
    model: ArtifactRef
    """The Hugging Face folder, as an artifact."""


class PolicyPublished(ModelEvent):
    """A version is a Hugging Face folder and registered."""

    event: ClassVar[str] = "policy.published"


class PolicyPromoted(ModelEvent):
    """A published version has got the alias."""

    event: ClassVar[str] = "policy.promoted"

    alias: str
    """The alias."""


class RunFinished(RunEvent):
    """A training run is complete."""

    event: ClassVar[str] = "run.finished"

    steps: int
    """Its steps."""
    policy: ArtifactRef
    """The final version."""
    heldout_before: float | None = None
    """Held-out accuracy of version 0."""
    heldout_after: float | None = None
    """Held-out accuracy of the final version."""


class Failure(Event):
    """A flow run failed, crashed or was cancelled."""

    state: str
    """Failed, Crashed or Cancelled."""
    reason: str
    """What happened, one line."""
    advice: str
    """What to do."""


class RunFailed(RunEvent, Failure):
    """A flow run of a training run did not end well."""

    event: ClassVar[str] = "run.failed"

    step: int | None = None
    """Steps that are committed, from which the run goes on."""


class VersionFailure(RunEvent, Failure):
    """What was to be done with a version did not end well."""

    version: int | None = None
    """The version's number; null: the last committed one was asked for."""


class EvaluationFailed(VersionFailure):
    """An evaluation did not end well."""

    event: ClassVar[str] = "evaluation.failed"


class PublicationFailed(VersionFailure):
    """A publication did not end well."""

    event: ClassVar[str] = "publication.failed"


class DatasetFailed(Failure):
    """A dataset was not prepared."""

    event: ClassVar[str] = "dataset.failed"
    about: ClassVar[tuple[str, str]] = ("data.dataset", "name")

    name: str
    """The dataset's name."""
    environment: str
    """The environment that would score its responses."""
    store: str
    """Root of the store that would have it."""


class EngineMemory(RunEvent):
    """The trainer ran out of memory and goes on with a smaller microbatch."""

    event: ClassVar[str] = "engine.memory"

    step: int
    """The step that did not fit."""
    microbatch_tokens: int
    """The microbatch from here on."""


EVENTS: tuple[type[Event], ...] = (
    DatasetReady,
    PolicyCommitted,
    EvaluationFinished,
    PolicyPublished,
    PolicyPromoted,
    RunFinished,
    RunFailed,
    EvaluationFailed,
    PublicationFailed,
    DatasetFailed,
    EngineMemory,
)


def emit(event: Event) -> None:
    """Send an event to Prefect; it never fails the caller, and is lost where there is no server."""
    from prefect.events import emit_event

    resource, name = event.resource()
    emit_event(
        event=event.event,
        resource={"prefect.resource.id": resource, "prefect.resource.name": name, **event.labels()},
        payload=event.model_dump(mode="json"),
    )


if __name__ == "__main__":
    print(json.dumps({kind.event: kind.model_json_schema() for kind in EVENTS}, indent=1))
