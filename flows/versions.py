"""Policy versions of a run: found by number, and made again when their tensors are not kept any more."""

from dataclasses import dataclass
from functools import lru_cache

from flows.config import PLACES, TrainConfig, VersionConfig
from flows.ideas import IDEAS
from flows.session import Session
from flows.settings import parse_config
from infra.errors import BadInput
from infra.runs.run import Head, Run
from infra.storage.artifacts import ArtifactRef, open_artifact
from infra.storage.store import Store
from tasks.sync.retention import holding
from tasks.sync.task import commit_policy


@dataclass(frozen=True)
class Version:
    """A version of a run: the policy after `number` steps."""

    run: Run
    number: int
    update: ArtifactRef
    """What the trainer follows to get there."""


def run_config(config: VersionConfig) -> TrainConfig:
    """The settings that the run was started with, with `config`'s store, evaluation, tracking, timeouts and resources.

    Raises BadInput when there is no such run.
    """
    return _config_of(Run(store=Store.at(config.store).url, name=config.run), config)


def _config_of(run: Run, visitor: VersionConfig | TrainConfig) -> TrainConfig:
    """The settings that `run` was started with, with what the visitor's replace."""
    stored, places = run.settings(), run.read_json("places.json") or {}
    for content in filter(None, PLACES.values()):
        stored.pop(content, None)
    stored["model"] = visitor.model or places.get("model") or stored["model"]
    moved = visitor.environment if isinstance(visitor, VersionConfig) else None
    if environment := moved or places.get("environment"):
        stored["dataset"]["environment"] = environment
    if "python" in places:
        stored.setdefault("episodes", {})["python"] = places["python"]
    for name, (group, setting) in IDEAS.items():
        if name in places:
            stored[group][setting] = places[name]
    kept = visitor.model_dump(
        mode="json", include={"store", "credentials", "evaluation", "tracking", "timeouts", "resources"}
    )
    return parse_config(TrainConfig, {**stored, **kept, "run": run.name}, source=f"run {run.name}")


def find_version(run: Run, number: int | None) -> Version:
    """Version `number` of a run, None: the last committed. Raises BadInput for one that there is not."""
    head = run.head()
    if head is None:
        raise BadInput(f"run: {run.name!r} has no committed policy in {run.store}; train it first")
    if number is None or number == head.step:
        return Version(run, head.step, head.update)
    if number > head.step:
        raise BadInput(f"version: run {run.name!r} has versions 0 to {head.step}, not {number}")
    return Version(run, number, updates_of(head)[number])


def policy_of(session: Session, version: Version) -> ArtifactRef:
    """The version's tensors. Where they are gone, a trainer of its run makes them again, with the same digest.

    They are pinned until the session ends: a run that is trained meanwhile collects what it does not need.
    """
    run = version.run
    stage = run.stage("policy", version.number, [version.update])
    if done := session.holds.enter_context(holding(run, Store.at(stage.store).uri(stage.key))):
        return done
    trainer = session.trainer_of(run, session.config if run == session.run else _config_of(run, session.config))
    session.start_alone(trainer)
    with session.progress.waiting(
        f"making version {version.number} of {run.name} again", phase="making a version again"
    ):
        made = commit_policy(
            stage,
            trainer,
            session.config.sync,
            update=version.update,
            parent=None,
            timeout_s=session.config.timeouts.update_s,
        )
    session.stop(trainer)  # two engines at once need not fit
    return made


@lru_cache(maxsize=8)
def updates_of(head: Head) -> tuple[ArtifactRef, ...]:
    """The updates that lead to `head`, oldest first: the base (after its warm start, if it had one), and one a step."""
    updates = [head.update]
    while (inputs := open_artifact(updates[-1]).manifest.inputs) and inputs[1].kind == "scored":
        updates.append(inputs[0])
    return tuple(updates[::-1])
