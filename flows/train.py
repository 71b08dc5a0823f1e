"""The train flow: prompts -> rollouts -> rewards -> policy update -> weight sync, step by step.

prepare_dataset                                 prompts, train and held-out
publish_policy, sync_engine                     version 0
evaluate                                        held-out accuracy before
for each step
    generate_rollouts    vLLM                   rollouts of the policy version
    score_rollouts       the environment        rewards, advantages
    update_policy        Megatron               one optimizer step
    publish_policy       Megatron -> store      the next policy version
    sync_engine          store -> vLLM          applied in place, verified
verify_against_fresh_engine                     the engine holds what was trained
evaluate                                        held-out accuracy after
"""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.config import TrainConfig
from flows.evaluate import evaluate_version
from flows.prepare import dataset_of, split_size
from flows.recorder import Recorder, Times
from flows.session import Session, open_session
from infra.artifacts import ArtifactRef
from infra.run import Head
from tasks.dataset.batches import step_rows
from tasks.reward.task import score_rollouts
from tasks.rollout.task import generate_rollouts
from tasks.sync.retention import drop_old_versions
from tasks.sync.task import publish_policy, sync_engine, verify_against_fresh_engine
from tasks.update.task import commit_base, finish_checkpoint, update_policy


def _flow_run_name() -> str:
    config = flow_run.parameters["config"]
    name = config.get("run") if isinstance(config, dict) else config.run
    return f"train {name}" if name else f"train {flow_run.id}"


@flow(name="train", flow_run_name=_flow_run_name, persist_result=False)
def train(config: TrainConfig) -> dict[str, Any]:
    """Train a policy by RL. A run of the same name goes on from its last committed step.

    Returns the run's report (also report.json in the run's folder).
    """
    with open_session(config, config.run or f"train-{str(flow_run.id)[:8]}") as session:
        dataset = session.run.pinned("dataset", lambda: dataset_of(session.run.store, config.dataset, session.model))
        session.load_engines()
        base = first_version(session)
        head = session.run.head() or session.run.advance(None, base)
        recorder = Recorder(session, dataset, head)
        recorder.heldout["before"] = evaluate_version(session, dataset, base.policy, step=0)
        while head.step < config.steps:
            with recorder.step(head.step) as times:
                head = train_step(session, dataset, head, times)
            recorder.record(head)
        finish_checkpoint(
            session.run.stage("checkpoint", head.step, []), session.trainer,
            update=head.update, timeout_s=config.timeouts.update_s,
        )  # fmt: skip
        ack = acknowledge(session, head)
        recorder.heldout["after"] = evaluate_version(session, dataset, head.policy, step=head.step)
        if config.sync.verify_fresh:
            session.stop(session.trainer)  # its memory is the fresh engine's now
            with session.progress.waiting("comparing with a freshly loaded engine"):
                verify_against_fresh_engine(
                    session.run.stage("verification", head.step, [ack]), session.fresh_engine, config.sync,
                    policy=head.policy, ack=ack, vocab_size=session.vocab_size,
                )  # fmt: skip
        return recorder.finish(head)


def first_version(session: Session) -> Head:
    """Version 0: the base model, published by the trainer and applied to the engine like any other version."""
    base = commit_base(session.run.stage("base", 0, []), {"model_fingerprint": session.fingerprint})
    return publish(session, Head(step=0, update=base, policy=base))


def train_step(session: Session, dataset: ArtifactRef, head: Head, times: Times) -> Head:
    """One step of the DAG. Every stage is committed in the store and found there when the step is run again."""
    step, run, config = head.step, session.run, session.config
    with times("rollout", "vLLM generates rollouts"):
        rollouts = generate_rollouts(
            run.stage("rollout", step, [dataset, head.policy], f"{config.rollout.digest()}:{config.seed}"),
            session.rollout_engine, dataset=dataset, policy=head.policy, split="train",
            rows=step_rows(split_size(dataset, "train"), config.rollout.prompts_per_step, config.seed, step),
            samples=config.rollout.samples_per_prompt, seed=config.seed + step,
            temperature=config.rollout.temperature, timeout_s=config.timeouts.rollout_s,
        )  # fmt: skip
    with times("reward", "rewards are computed"):
        scored = score_rollouts(
            run.stage("reward", step, [rollouts, dataset], config.reward.digest()), config.reward,
            rollouts=rollouts, dataset=dataset, split="train",
        )  # fmt: skip
    with times("update", "Megatron updates the policy"):
        update = update_policy(
            run.stage("update", step, [head.update, scored], config.update.digest()), session.trainer,
            parent=head.update, scored=scored, checkpoint=(step + 1) % config.checkpoint_every == 0,
            timeout_s=config.timeouts.update_s,
        )  # fmt: skip
    with times("sync", "the new policy version goes to vLLM"):
        new = publish(session, Head(step=step + 1, update=update, policy=head.policy))
        session.run.advance(head, new)
        drop_old_versions(run, step + 1 - config.sync.keep_versions)
    return new


def publish(session: Session, head: Head) -> Head:
    """Publish the policy after `head.update` and have the engine acknowledge it; the head with that version."""
    policy = publish_policy(
        session.run.stage("policy", head.step, [head.update]), session.trainer,
        update=head.update, timeout_s=session.config.timeouts.sync_s,
    )  # fmt: skip
    new = Head(step=head.step, update=head.update, policy=policy)
    acknowledge(session, new)
    return new


def acknowledge(session: Session, head: Head) -> ArtifactRef:
    """The engine's acknowledgement of `head.policy`; an engine that is elsewhere is brought there first."""
    return sync_engine(
        session.ack_stage(head), session.rollout_engine, session.trainer, session.config.sync,
        update=head.update, policy=head.policy, vocab_size=session.vocab_size,
        timeout_s=session.config.timeouts.sync_s,
    )  # fmt: skip
