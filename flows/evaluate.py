"""The evaluate flow: accuracy of a policy version with its interval, prompt by prompt against a baseline."""

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from environments import short_name
from flows.config import EvaluateConfig
from flows.episodes import episodes_of, rollout_settings
from flows.prepare import dataset_of, split_size
from flows.reporting import report
from flows.reporting.confidence import estimate, paired_gain, reward_by_prompt
from flows.reporting.evaluation import Evaluation
from flows.reporting.failures import tell_failure
from flows.session import Session, open_session
from flows.versions import Version, find_version, policy_of, run_config
from infra.errors import BadInput
from infra.orchestration.credentials import use_credentials
from infra.orchestration.events import EvaluationFinished, emit
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef
from infra.storage.store import Store
from tasks.dataset.config import DatasetConfig
from tasks.reward.config import RewardConfig
from tasks.reward.task import check_reward, score_rollouts
from tasks.rollout.generate import SamplingRequest
from tasks.rollout.task import check_lengths, generate_rollouts


@flow(
    name="evaluate",
    flow_run_name="evaluate {config.run}",
    persist_result=False,
    on_failure=[tell_failure],
    on_crashed=[tell_failure],
    on_cancellation=[tell_failure],
)
def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate a policy version of a run, against a baseline version; returns an `Evaluation`.

    What is already in the store (the evaluations before and after training, say) is not sampled again.
    """
    use_credentials(config.credentials)
    store = Store.at(config.store).url
    version, baseline = versions_of(config)
    with open_session(run_config(config), config.run, visit=f"evaluate-{str(flow_run.id)[:8]}") as session:
        if config.baseline is not None and baseline is None:
            session.progress.line(
                f"version {version.number} of {config.run} is the baseline itself: nothing is compared"
            )
        result, ref = compare_versions(session, version, baseline, config.dataset)
        tell(session, result)
    announce(store, result, ref)
    return result.model_dump(mode="json")


def versions_of(config: EvaluateConfig) -> tuple[Version, Version | None]:
    """(the version, its baseline); no baseline where none is asked for, and where it would be the version itself.

    Raises BadInput for one that there is not, and for a baseline that no engine can serve beside the version.
    """
    store = Store.at(config.store).url
    version = find_version(Run(store=store, name=config.run), config.version)
    if config.baseline is None:
        return version, None
    baseline = find_version(Run(store=store, name=config.baseline_run or config.run), config.baseline)
    require_one_model(version, baseline)
    return version, None if baseline == version else baseline


def compare_versions(
    session: Session, version: Version, baseline: Version | None, other_dataset: DatasetConfig | None
) -> tuple[Evaluation, ArtifactRef]:
    """Evaluate a version and its baseline; the result, and the artifact of kind `evaluation` that holds it."""
    config, evaluation = session.config, session.config.evaluation
    if other_dataset is None:
        dataset, reward = (
            session.run.pinned("dataset", lambda: dataset_of(session.run.store, config.dataset, session.model)),
            None,
        )
    else:  # the run's weights name parts of another environment's reward
        dataset, reward = (
            dataset_of(session.run.store, other_dataset, session.model),
            config.reward.model_copy(update={"weights": {}}),
        )
    size = split_size(dataset, evaluation.split)
    check_lengths(config.rollout, session.model, dataset, evaluation.split, [list(evaluated_rows(session, size))])
    check_reward(reward or config.reward, dataset, evaluation.split)
    scored, policies, numbers = [], [], []
    for one in (version, baseline) if baseline else (version,):
        policies.append(policy_of(session, one))
        scored.append(score_version(session, one.run, dataset, policies[-1], one.number, reward))
        numbers.append(reward_by_prompt(scored[-1]))
    estimates = [estimate(list(by_prompt.values()), evaluation.confidence) for by_prompt in numbers]
    environment = short_name((other_dataset or config.dataset).environment)  # of a path: no place is in an artifact
    result = Evaluation(
        run=version.run.name,
        version=version.number,
        policy=policies[0],
        environment=environment,
        dataset=dataset,
        split=evaluation.split,
        samples=evaluation.samples,
        confidence=evaluation.confidence,
        accuracy=estimates[0],
    )
    if baseline:
        result = result.model_copy(
            update={
                "baseline_run": baseline.run.name,
                "baseline_version": baseline.number,
                "baseline": estimates[1],
                "gain": paired_gain(numbers[0], numbers[1], evaluation.confidence),
            }
        )
    stage = version.run.stage("evaluation", version.number, scored, evaluation.digest())
    if done := stage.committed():
        return result, done
    with stage.write("evaluation") as writer:
        writer.json("evaluation", result.model_dump(mode="json"))
    return result, writer.ref


def evaluate_version(session: Session, dataset: ArtifactRef, policy: ArtifactRef, step: int) -> dict[str, float]:
    """The run's own evaluation of its version `step`: `accuracy`, `low`, `high`, `standard_error` and `prompts`."""
    scored = score_version(session, session.run, dataset, policy, step)
    values = estimate(list(reward_by_prompt(scored).values()), session.config.evaluation.confidence)
    figures = {"accuracy": values.mean, **values.model_dump(exclude={"mean"})}
    session.tracker.metrics(step, {f"evaluation/{session.config.evaluation.split}/accuracy": values.mean})
    return figures


def score_version(
    session: Session,
    run: Run,
    dataset: ArtifactRef,
    policy: ArtifactRef,
    step: int,
    reward: RewardConfig | None = None,
) -> ArtifactRef:
    """Sample the evaluation's prompts from version `step` of `run` and score them; found if it is done already."""
    config, evaluation, reward = session.config, session.config.evaluation, reward or session.config.reward
    # What is not learned from counts all the same: a prompt that is always or never answered, a response that was cut.
    plain = {"truncated": "keep", "zero_variance": "keep", "overlong_length": None, "overlong_buffer": None}
    reward = reward.model_copy(update=plain)
    size = split_size(dataset, evaluation.split)
    settings = f"{config.rollout.digest()}:{evaluation.sampling()}:{config.seed}"
    phase = "evaluating"
    if session.rollout_engine not in session.started:
        phase = "evaluating, with an engine to load"
        session.started.append(session.rollout_engine)  # the first call loads it, and the session's end stops it
    with session.progress.waiting(f"evaluating version {step} on {evaluation.split}", phase=phase):
        request = SamplingRequest(
            dataset=dataset,
            split=evaluation.split,
            rows=list(evaluated_rows(session, size)),
            samples=evaluation.samples,
            seed=config.seed,
            temperature=evaluation.temperature,
            episodes=episodes_of(config.episodes, dataset, evaluation.split),
        )
        settings = rollout_settings(settings, request.episodes)
        stage = run.stage("evaluation-rollout", step, [dataset, policy], settings)
        rollouts = generate_rollouts(
            stage, session.rollout_engine, request, policy=policy, timeout_s=config.timeouts.rollout_s
        )
        stage = run.stage("evaluation-reward", step, [rollouts, dataset], reward.digest())
        return score_rollouts(stage, reward, rollouts=rollouts, dataset=dataset, split=evaluation.split)


def evaluated_rows(session: Session, size: int) -> range:
    """Rows of the prompts that are evaluated, of a split of `size`."""
    return range(min(size, session.config.evaluation.prompts or size))


def require_one_model(version: Version, baseline: Version) -> None:
    """Raises BadInput unless the two versions are weights of one architecture: one engine serves both."""
    ours, theirs = version.run.settings(), baseline.run.settings()
    if ours["model_fingerprint"] != theirs["model_fingerprint"]:
        raise BadInput(
            f"baseline: run {baseline.run.name!r} started from {theirs['model']}, run {version.run.name!r} from "
            f"{ours['model']}; compare versions that started from the same model"
        )


def announce(store: str, result: Evaluation, ref: ArtifactRef) -> None:
    """The event of a finished evaluation."""
    gain = {"gain": result.gain.mean, "gain_low": result.gain.low} if result.gain else {}
    accuracy = result.accuracy
    emit(
        EvaluationFinished(
            run=result.run,
            store=store,
            version=result.version,
            evaluation=ref,
            environment=result.environment,
            split=result.split,
            accuracy=accuracy.mean,
            low=accuracy.low,
            high=accuracy.high,
            **gain,
        )
    )


def tell(session: Session, result: Evaluation) -> None:
    """The result as a line, in MLflow and as a page in Prefect."""
    for line in report.evaluation_lines(result):
        session.progress.line(line)
    prefix = f"evaluation/{result.environment.rpartition('/')[2]}/{result.split}"
    figures = {f"{prefix}/accuracy": result.accuracy.mean}
    if result.gain:
        figures[f"{prefix}/gain"] = result.gain.mean
    session.tracker.metrics(result.version, figures)
    create_markdown_artifact(
        report.evaluation_markdown(result),
        key=f"{session.pages}-evaluation",
        description=f"Evaluation of version {result.version} of {result.run}",
    )
