"""The evaluate flow: accuracy of a policy version on a split, with its standard error."""

from prefect import flow

from flows.config import TrainConfig
from flows.prepare import dataset_of, split_size
from flows.session import Session, open_session
from infra.actors import Engine
from infra.artifacts import ArtifactRef, open_artifact
from infra.errors import BadInput
from infra.run import Run
from infra.store import Store
from tasks.reward.task import score_rollouts
from tasks.rollout.task import generate_rollouts


@flow(name="evaluate", persist_result=False)
def evaluate(config: TrainConfig) -> dict[str, float]:
    """Evaluate the last committed policy of the run `config.run`; returns accuracy, its standard error and counts."""
    if not config.run:
        raise BadInput("run: name the run whose policy is to be evaluated")
    head = Run(store=Store.at(config.store).url, name=config.run).head()
    if head is None:
        raise BadInput(f"run: {config.run!r} has no committed policy in {config.store}; train it first")
    with open_session(config, config.run) as session:
        dataset = session.run.pinned("dataset", lambda: dataset_of(session.run.store, config.dataset, session.model))
        session.started.append(session.rollout_engine)
        with session.progress.waiting("loading vLLM"):
            Engine(session.rollout_engine).load(config.timeouts.load_s)
        result = evaluate_version(session, dataset, head.policy, step=head.step)
        session.progress.line(f"run {config.run}, step {head.step}: {result}")
        return result


def evaluate_version(session: Session, dataset: ArtifactRef, policy: ArtifactRef, step: int) -> dict[str, float]:
    """Sample the evaluation's prompts from a policy version and score them.

    Returns `accuracy` (mean reward over samples), `standard_error` (over prompts), `prompts` and `samples`.
    """
    run, config, evaluation = session.run, session.config, session.config.evaluation
    size = split_size(dataset, evaluation.split)
    settings = f"{config.rollout.digest()}:{evaluation.digest()}:{config.seed}"
    with session.progress.waiting(f"evaluating version {step} on {evaluation.split}"):
        rollouts = generate_rollouts(
            run.stage("evaluation-rollout", step, [dataset, policy], settings), session.rollout_engine,
            dataset=dataset, policy=policy, split=evaluation.split,
            rows=list(range(min(size, evaluation.prompts or size))),
            samples=evaluation.samples, seed=config.seed, temperature=evaluation.temperature,
            timeout_s=config.timeouts.rollout_s,
        )  # fmt: skip
        scored = score_rollouts(
            run.stage("evaluation-reward", step, [rollouts, dataset], config.reward.digest()), config.reward,
            rollouts=rollouts, dataset=dataset, split=evaluation.split,
        )  # fmt: skip
    return accuracy(scored)


def accuracy(scored: ArtifactRef) -> dict[str, float]:
    """Mean reward and its standard error; prompts are the independent units, their samples are averaged first."""
    import numpy as np

    table = open_artifact(scored).table("scored").select(["prompt_id", "reward"])
    by_prompt = table.group_by("prompt_id").aggregate([("reward", "mean")])["reward_mean"].to_numpy()
    error = float(np.std(by_prompt, ddof=1) / np.sqrt(len(by_prompt))) if len(by_prompt) > 1 else float("nan")
    return {
        "accuracy": float(by_prompt.mean()),
        "standard_error": error,
        "prompts": float(len(by_prompt)),
        "samples": float(table.num_rows),
    }
