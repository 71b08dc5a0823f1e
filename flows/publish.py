"""The publish flow: a policy version becomes a Hugging Face folder and a registered model, promoted if it is better.

evaluate        the version, and the holder of the alias (or version 0 of the run)
export_model    the version as the files of a Hugging Face folder, in the store
check_model     loaded by transformers and vLLM, it is the policy that was trained
register_model  a version of MLflow's registered model, with its lineage
                the alias, if the gain in accuracy is large enough beyond doubt
"""

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from flows.config import PublishConfig, TrainConfig
from flows.evaluate import announce, compare_versions, require_one_model, tell
from flows.reporting import report
from flows.reporting.evaluation import Evaluation
from flows.reporting.failures import tell_failure
from flows.session import Session, model_name, open_session
from flows.versions import Version, find_version, run_config
from infra.errors import BadInput
from infra.orchestration.assets import record_asset
from infra.orchestration.credentials import use_credentials
from infra.orchestration.events import PolicyPromoted, PolicyPublished, emit
from infra.runs.run import Head, Run
from infra.storage.artifacts import ArtifactRef, open_artifact
from infra.storage.store import Store
from infra.storage.urls import local_path
from tasks.publish.folder import fetch_model, model_folder, write_adapter
from tasks.publish.registry import Registered, annotate, check_model_name, holder, promote
from tasks.publish.task import check_model, export_model, register_model
from tasks.sync.verify import ProbeResult, probe_sequences

MERGED = 0.5
"""What a logprob may differ by at least (nats) where an adapter is merged: the sum is rounded to the base model's dtype."""


@flow(
    name="publish",
    flow_run_name="publish {config.run}",
    persist_result=False,
    on_failure=[tell_failure],
    on_crashed=[tell_failure],
    on_cancellation=[tell_failure],
)
def publish(config: PublishConfig) -> dict[str, Any]:
    """Publish a policy version of a run; returns where it lies, its registry version, and whether it was promoted."""
    check_folders(config)
    use_credentials(config.credentials)
    version, settings = version_of(config)
    run = version.run
    name = config.name or check_model_name(Path(model_name(run, settings)).name)
    with open_session(settings, config.run, visit=f"publish-{str(flow_run.id)[:8]}") as session:
        if config.version is None and not (run.read_json("report.json") or {}).get("complete"):
            session.progress.line(f"run {config.run} is not finished: version {version.number} is its last so far")
        session.tracker.opened()  # it imports MLflow in a thread; two threads that import it at once lock each other out
        incumbent = holder(session.tracker.uri, name, config.alias)
        baseline = baseline_of(version, incumbent)
        if baseline is None:
            session.progress.line(f"{itself(config.run, version.number, incumbent, config.alias)}: nothing is compared")
        evaluation, evaluated = compare_versions(session, version, baseline, config.dataset)
        tell(session, evaluation)
        announce(run.store, evaluation, evaluated)
        session.stop_all()  # the check loads an engine of its own
        policy = evaluation.policy
        model = export_model(
            run.stage("model", version.number, [policy]),
            policy=policy,
            base=session.model,
            facts={"run": config.run, "version": version.number, "base": session.fingerprint},
        )
        check(session, version, policy, model, config)
        if config.adapter_folder:
            write_adapter(policy, Path(config.adapter_folder), config.fused_experts)
            session.progress.line(f"the adapter alone: {config.adapter_folder}")
        registered = register_model(
            run.stage("register", version.number, [model]),
            uri=session.tracker.uri,
            name=name,
            model=model,
            mlflow_run=session.tracker.opened(),
            tags=lineage(session, version, evaluation, evaluated, model),
        )
        promoted, why = decide(config, evaluation, registered, incumbent)
        annotate(session.tracker.uri, registered, {"policyflow.decision": why})
        if promoted:
            promote(session.tracker.uri, registered, config.alias)
    result = {
        "model": model.model_dump(),
        "folder": str(fetch_model(model, config.folder)) if config.folder else model_folder(model),
        "name": registered.name,
        "model_version": registered.version,
        "promoted": promoted,
        "decision": why,
        "evaluation": evaluation.model_dump(mode="json"),
    }
    conclude(session, config, version, model, registered, result)
    return result


def check_folders(config: PublishConfig) -> None:
    """Raises BadInput for a folder to be written that is there already."""
    for name in ("folder", "adapter_folder"):
        if (folder := getattr(config, name)) and Path(folder).exists():
            raise BadInput(f"{name}: {folder} exists; name a new one")


def version_of(config: PublishConfig) -> tuple[Version, TrainConfig]:
    """(the version to publish, its run's settings). Raises BadInput for one that there is not, or that has no adapter."""
    run = Run(store=Store.at(config.store).url, name=config.run)
    version, settings = find_version(run, config.version), run_config(config)
    if config.adapter_folder and settings.trained_lora is None:
        raise BadInput(
            f"adapter_folder: run {config.run!r} trained the whole policy; a run with policy lora has an adapter"
        )
    return version, settings


def baseline_of(version: Version, incumbent: Registered | None) -> Version | None:
    """The version behind the alias, where it can be evaluated; else version 0 of the run. None: it is `version` itself."""
    if incumbent is None:
        return find_version(version.run, 0) if version.number else None
    try:
        run = run_of(incumbent.tags, version.run.store)
        found = find_version(run, int(incumbent.tags["policyflow.version"]))
        require_one_model(version, found)
    except (KeyError, BadInput) as error:
        raise BadInput(
            f"the alias's holder, {incumbent.name} version {incumbent.version}, cannot be compared with: {error}; "
            "publish under another name or alias, or remove the alias"
        ) from None
    return None if found == version else found


def itself(run: str, version: int, incumbent: Registered | None, alias: str) -> str:
    """Which version it is that would be compared with itself."""
    what = f"has the alias {alias}" if incumbent else "is the model that the run started from"
    return f"version {version} of {run} {what}"


def run_of(tags: dict[str, str], store: str) -> Run:
    """The run that a registered version came from: in `store`, if that has it by its id, since the store may have moved; else
    where the version was published from. Raises KeyError."""
    run, here = (Run(store=one, name=tags["policyflow.run"]) for one in (tags["policyflow.store"], store))
    return here if here.known_id() == tags.get("policyflow.id", "") else run


def decide(
    config: PublishConfig, evaluation: Evaluation, registered: Registered, incumbent: Registered | None
) -> tuple[bool, str]:
    """(whether the version gets the alias, why). A version that is its own baseline has a gain of exactly 0."""
    if incumbent and incumbent.version == registered.version:
        return False, f"version {registered.version} has the alias {config.alias} already"
    if evaluation.gain is None:
        promoted = config.minimum_gain < 0
        end = f"promoted to {config.alias}" if promoted else "not promoted"
        return (
            promoted,
            f"{end}; {itself(evaluation.run, evaluation.version, incumbent, config.alias)}: no gain over itself",
        )
    gain, against = evaluation.gain, f"version {evaluation.baseline_version} of run {evaluation.baseline_run}"
    what = f"gain over {against}: {gain.mean:+.3f}, {gain.low:+.3f} to {gain.high:+.3f} at {evaluation.confidence:.0%}"
    if gain.low > config.minimum_gain:
        return True, f"promoted to {config.alias}; {what}"
    return False, f"not promoted: the lower end is not above minimum_gain {config.minimum_gain:g}; {what}"


def check(session: Session, version: Version, policy: ArtifactRef, model: ArtifactRef, config: PublishConfig) -> None:
    """Hold the published folder against what the training engine said of the version when it was synced."""
    head = Head(step=version.number, update=version.update, policy=policy)
    ack = session.ack_stage(head).committed()
    if ack is None:
        raise BadInput(f"version {version.number} of {config.run} was never acknowledged by an engine")
    settings = session.config
    folder = local_path(model_folder(model))
    engine = session.published_engine(folder) if config.check_engine and folder is not None else None
    probe = ProbeResult.model_validate(open_artifact(ack).json("probe")).engine
    limits = {
        "limits": settings.sync.limits(probe.arithmetic, probe.arithmetic),  # MXFP8: it quantises the numbers again
        "transformers_limits": settings.sync.limits(probe.arithmetic, "float32"),
    }
    if settings.trained_lora:
        limits = {who: found._replace(largest=max(found.largest, MERGED)) for who, found in limits.items()}
    with session.progress.waiting("transformers and vLLM load the published folder"):
        check_model(
            version.run.stage("check", version.number, [model, ack], str(engine is not None)),
            model=model,
            policy=policy,
            engine=engine,
            sequences=probe_sequences(settings.sync, session.vocab_size),
            logprobs=probe.logprobs,
            timeout_s=config.timeouts.load_s,
            **limits,
        )


def lineage(
    session: Session, version: Version, evaluation: Evaluation, evaluated: ArtifactRef, model: ArtifactRef
) -> dict[str, str]:
    """What the registry knows of where a version comes from."""
    what = open_artifact(evaluation.policy)
    return {
        "policyflow.store": version.run.store,
        "policyflow.run": version.run.name,
        "policyflow.id": session.run_id,
        "policyflow.version": str(version.number),
        "policyflow.policy_digest": what.metadata["policy_digest"],
        "policyflow.base": session.config.model,
        "policyflow.base_fingerprint": session.fingerprint,
        "policyflow.code_version": what.manifest.provenance.get("code_version", ""),
        "policyflow.accuracy": f"{evaluation.accuracy.mean:.4f}",
        "ref.policy": evaluation.policy.model_dump_json(),
        "ref.model": model.model_dump_json(),
        "ref.evaluation": evaluated.model_dump_json(),
        "ref.dataset": evaluation.dataset.model_dump_json(),
    }


def conclude(
    session: Session, config: PublishConfig, version: Version, model: ArtifactRef, registered: Registered, result: Any
) -> None:
    """Lines, a page, the asset and the events."""
    for line in (
        f"published {registered.name} version {registered.version}: {result['folder']}",
        f"  {result['decision']}",
        f"  MLflow     {session.tracker.uri}, models:/{registered.name}/{registered.version}",
    ):
        session.progress.line(line)
    evaluation = Evaluation.model_validate(result["evaluation"])
    create_markdown_artifact(
        report.publication_markdown(registered.tags, result, evaluation),
        key=f"{session.pages}-published",
        description=f"{registered.name} {registered.version}",
    )
    record_asset(
        model,
        name=f"{registered.name} {registered.version}",
        description=result["decision"],
        upstream=[evaluation.policy],
        metadata={"run": config.run, "version": version.number},
    )
    facts = {
        "name": registered.name,
        "model_version": registered.version,
        "run": config.run,
        "version": version.number,
        "model": model,
    }
    emit(PolicyPublished(**facts))
    if result["promoted"]:
        emit(PolicyPromoted(**facts, alias=config.alias))
