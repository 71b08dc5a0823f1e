"""The evaluate flow: accuracy of a policy version with its interval, prompt by prompt against a baseline."""

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from flows import report
from flows.config import EvaluateConfig
from flows.failures import tell_failure
from flows.intervals import Estimate, estimate, paired_gain, reward_by_prompt
from flows.prepare import dataset_of, split_size
from flows.session import Session, open_session
from flows.versions import Version, find_version, policy_of, run_config
from infra.artifacts import ArtifactRef
from infra.config import Config
from infra.credentials import use_credentials
from infra.errors import BadInput
from infra.events import EvaluationFinished, emit
from infra.run import Run
from infra.store import Store
from tasks.dataset.config import DatasetConfig
from tasks.reward.config import RewardConfig
from tasks.reward.task import check_reward, score_rollouts
from tasks.rollout.task import generate_rollouts


class Evaluation(Config):
    """What an evaluation found."""

    run: str
    """The evaluated version's run."""
    version: int
    """Its number."""
    policy: ArtifactRef
    """The version."""
    environment: str
    """What was to be solved."""
    dataset: ArtifactRef
    """The prompts."""
    split: str
    """Of the dataset."""
    samples: int
    """Responses a prompt."""
    confidence: float
    """Of the intervals."""
    accuracy: Estimate
    """Mean reward over prompts."""
    baseline_run: str | None = None
    """The baseline's run."""
    baseline_version: int | None = None
    """Its number; null: there is none."""
    baseline: Estimate | None = None
    """Its accuracy on the same prompts."""
    gain: Estimate | None = None
    """Accuracy minus the baseline's, paired by prompt."""


@flow(
    name="evaluate", flow_run_name="evaluate {config.run}", persist_result=False,
    on_failure=[tell_failure], on_crashed=[tell_failure], on_cancellation=[tell_failure],
)  # fmt: skip
def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate a policy version of a run, against a baseline version; returns an `Evaluation`.

    What is already in the store (the evaluations before and after training, say) is not sampled again.
    """
    use_credentials(config.credentials)
    store = Store.at(config.store).url
    version = find_version(Run(store=store, name=config.run), config.version)
    baseline = None
    if config.baseline is not None:
        baseline = find_version(Run(store=store, name=config.baseline_run or config.run), config.baseline)
        require_one_model(version, baseline)
    with open_session(run_config(config), config.run, visit=f"evaluate-{str(flow_run.id)[:8]}") as session:
        result, ref = compare_versions(session, version, baseline, config.dataset)
        tell(session, result)
    announce(store, result, ref)
    return result.model_dump(mode="json")


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
    split_size(dataset, evaluation.split)
    check_reward(reward or config.reward, dataset, evaluation.split)
    scored, policies, numbers = [], [], []
    for one in (version, baseline) if baseline else (version,):
        policies.append(policy_of(session, one))
        scored.append(score_version(session, one.run, dataset, policies[-1], one.number, reward))
        numbers.append(reward_by_prompt(scored[-1]))
    estimates = [estimate(list(by_prompt.values()), evaluation.confidence) for by_prompt in numbers]
    environment = other_dataset.environment if other_dataset else config.dataset.environment
    result = Evaluation(
        run=version.run.name, version=version.number, policy=policies[0], environment=environment, dataset=dataset,
        split=evaluation.split, samples=evaluation.samples, confidence=evaluation.confidence, accuracy=estimates[0],
    )  # fmt: skip
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
    size = split_size(dataset, evaluation.split)
    settings = f"{config.rollout.digest()}:{evaluation.sampling()}:{config.seed}"
    if session.rollout_engine not in session.started:
        session.started.append(session.rollout_engine)  # the first call loads it, and the session's end stops it
    with session.progress.waiting(f"evaluating version {step} on {evaluation.split}"):
        rollouts = generate_rollouts(
            run.stage("evaluation-rollout", step, [dataset, policy], settings), session.rollout_engine,
            dataset=dataset, policy=policy, split=evaluation.split,
            rows=list(range(min(size, evaluation.prompts or size))),
            samples=evaluation.samples, seed=config.seed, temperature=evaluation.temperature,
            timeout_s=config.timeouts.rollout_s,
        )  # fmt: skip
        return score_rollouts(
            run.stage("evaluation-reward", step, [rollouts, dataset], reward.digest()), reward,
            rollouts=rollouts, dataset=dataset, split=evaluation.split,
        )  # fmt: skip


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
            run=result.run, store=store, version=result.version, evaluation=ref, environment=result.environment,
            split=result.split, accuracy=accuracy.mean, low=accuracy.low, high=accuracy.high, **gain,
        )
    )  # fmt: skip


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
        report.evaluation_markdown(result), key=f"{report.artifact_key(result.run)}-evaluation",
        description=f"Evaluation of version {result.version} of {result.run}",
    )  # fmt: skip
