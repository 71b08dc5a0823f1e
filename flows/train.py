"""The train flow: prompts -> rollouts -> rewards -> policy update -> weight sync, step by step.

prepare_dataset                                 prompts, train and held-out
warm_start_policy                               supervised steps on the environment's solutions, if asked for
commit_policy, sync_engine                     version 0
evaluate                                        held-out accuracy before
for each step
    generate_rollouts    vLLM                   rollouts of the policy version
    score_rollouts       the environment        rewards, advantages
    update_policy        Megatron               one optimizer step
    commit_policy       Megatron -> store      the next policy version
    sync_engine          store -> vLLM          applied in place, verified
verify_against_fresh_engine                     the engine holds what was trained
evaluate                                        held-out accuracy after
"""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.config import TrainConfig
from flows.episodes import episodes_of, rollout_settings
from flows.evaluate import evaluate_version
from flows.microbatch import within_memory
from flows.prepare import run_dataset, split_size
from flows.reporting.failures import default_run, end_crash_loop, run_of, tell_failure
from flows.reporting.recorder import Recorder, Times, finished_report, warm_start_line
from flows.session import Session, open_session
from infra.errors import BadInput, Corrupted, Transient
from infra.orchestration.credentials import use_credentials
from infra.runs.run import Head
from infra.storage.artifacts import ArtifactRef
from tasks.dataset.batches import step_rows
from tasks.dataset.task import check_demonstrations, commit_demonstrations
from tasks.reward.task import check_reward, score_rollouts
from tasks.rollout.generate import SamplingRequest
from tasks.rollout.task import check_lengths, generate_rollouts
from tasks.sync.retention import drop_old_versions
from tasks.sync.task import commit_policy, sync_engine, verify_against_fresh_engine
from tasks.update.task import commit_base, finish_checkpoint, update_policy, warm_start_policy


def _flow_run_name() -> str:
    return f"train {run_of(flow_run.parameters, str(flow_run.id))[0]}"


@flow(
    name="train",
    flow_run_name=_flow_run_name,
    persist_result=False,
    on_failure=[tell_failure],
    on_crashed=[tell_failure],
    on_cancellation=[tell_failure],
)
def train(config: TrainConfig, dataset: ArtifactRef | None = None) -> dict[str, Any]:
    """Train a policy by RL. A run of the same name goes on from its last committed step.

    Returns the run's report (also report.json in the run's folder).

    Args:
        config: The run's settings; a profile's values.
        dataset: The dataset to train on, as the event `dataset.ready` names it. Null: the one that config.dataset describes.
    """
    use_credentials(config.credentials)
    with open_session(config, config.run or default_run(str(flow_run.id))) as session:
        head = session.run.head()
        end_crash_loop(session.run, head.step if head else 0)
        dataset = run_dataset(session.run, config.dataset, dataset, session.model, config.timeouts.dataset_s)
        if report := finished_report(session):
            return report
        check_dataset_use(session, dataset)
        demonstrations = demonstrations_of(session, dataset)
        session.load_engines()
        base = first_version(session, demonstrations)
        head = session.run.head() or session.run.advance(None, base)
        recorder = Recorder(session, dataset, head)
        recorder.heldout["before"] = evaluate_version(session, dataset, base.policy, step=0)
        while head.step < config.steps:
            with recorder.step(head.step) as times:
                head = train_step(session, dataset, head, times)
            recorder.record(head)
        finish_checkpoint(
            session.run.stage("checkpoint", head.step, []),
            session.trainer,
            update=head.update,
            timeout_s=config.timeouts.update_s,
        )
        ack = acknowledge(session, head)
        recorder.heldout["after"] = evaluate_version(session, dataset, head.policy, step=head.step)
        if config.sync.verify_fresh:
            session.stop(session.trainer)  # its memory is the fresh engine's now
            with session.progress.waiting("comparing with a freshly loaded engine"):
                verify_against_fresh_engine(
                    session.run.stage("verification", head.step, [ack]),
                    session.fresh_engine,
                    config.sync,
                    policy=head.policy,
                    ack=ack,
                    vocab_size=session.vocab_size,
                )
        return recorder.finish(head)


def check_dataset_use(session: Session, dataset: ArtifactRef) -> None:
    """BadInput when the run cannot be trained or evaluated on the dataset, before an engine is loaded for it."""
    config = session.config
    splits = {split: split_size(dataset, split) for split in ("train", config.evaluation.split)}
    check_reward(config.reward, dataset, *splits)
    per_step = config.rollout.prompts_per_step
    steps = (step_rows(splits["train"], per_step, config.seed, step) for step in range(config.steps))
    evaluated = list(range(splits[config.evaluation.split]))[: config.evaluation.prompts]
    for split, calls in (("train", steps), (config.evaluation.split, [evaluated])):
        dropped = check_lengths(config.rollout, session.model, dataset, split, calls)
        if dropped:
            session.progress.line(
                f"{dropped} of {splits[split]} prompts of split {split} are too long for rollout.max_model_len and left out"
            )


def demonstrations_of(session: Session, dataset: ArtifactRef) -> ArtifactRef | None:
    """What the warm start learns from, if the settings ask for one."""
    settings = session.config.warm_start
    if not settings.steps:
        return None
    stage = session.run.stage("demonstrations", 0, [dataset], settings.digest())
    ref = commit_demonstrations(stage, dataset=dataset, settings=settings.model_dump(mode="json"))
    check_demonstrations(ref, session.model)
    return ref


def first_version(session: Session, demonstrations: ArtifactRef | None) -> Head:
    """Version 0: the base model, after its warm start if there is one, committed by the trainer and applied to the engine
    like any other version."""
    base = commit_base(session.run.stage("base", 0, []), {"model_fingerprint": session.fingerprint})
    if demonstrations is not None:
        with session.progress.waiting("supervised warm start"):
            base = warm_start_policy(
                session.run.stage("warm-start", 0, [base, demonstrations], session.config.update.digest()),
                session.trainer,
                parent=base,
                demonstrations=demonstrations,
                timeout_s=session.config.timeouts.update_s,
            )
        session.progress.line(warm_start_line(base))
    return commit_version(session, Head(step=0, update=base, policy=base), parent=None)


def train_step(session: Session, dataset: ArtifactRef, head: Head, times: Times) -> Head:
    """One step of the DAG. Every stage is committed in the store and found there when the step is run again."""
    step, run, config = head.step, session.run, session.config
    with times("rollout", "vLLM generates rollouts"):
        request = SamplingRequest(
            dataset=dataset,
            split="train",
            rows=step_rows(split_size(dataset, "train"), config.rollout.prompts_per_step, config.seed, step),
            samples=config.rollout.samples_per_prompt,
            seed=config.seed + step,
            temperature=config.rollout.temperature,
            episodes=episodes_of(config.episodes, dataset, "train"),
        )
        settings = rollout_settings(f"{config.rollout.digest()}:{config.seed}", request.episodes)
        stage = run.stage("rollout", step, [dataset, head.policy], settings)
        rollouts = generate_rollouts(
            stage, session.rollout_engine, request, policy=head.policy, timeout_s=config.timeouts.rollout_s
        )
    with times("reward", "rewards are computed"):
        stage = run.stage("reward", step, [rollouts, dataset], config.reward.digest())
        scored = score_rollouts(stage, config.reward, rollouts=rollouts, dataset=dataset, split="train")
    with times("update", "Megatron updates the policy"):
        stage = run.stage("update", step, [head.update, scored], config.update.digest())
        checkpoint = (step + 1) % config.checkpoint_every == 0

        def update_once() -> ArtifactRef:
            return update_policy(
                stage,
                session.trainer,
                parent=head.update,
                scored=scored,
                checkpoint=checkpoint,
                timeout_s=config.timeouts.update_s,
            )

        update = within_memory(session, step, update_once)
    with times("sync", "the new policy version goes to vLLM"):
        new = commit_version(session, Head(step=step + 1, update=update, policy=head.policy), parent=head.policy)
        session.run.advance(head, new)
        if new.step % config.sync.anchor_every == 0:  # before a new anchor, all chains still need the last one
            collect_versions(session, new)
    return new


def collect_versions(session: Session, head: Head) -> None:
    """Old versions go; where the store does not let them, the run goes on, and a later collection finds them."""
    try:
        drop_old_versions(session.run, head.policy, session.config.sync.keep_versions)
    except (Transient, Corrupted, BadInput) as fault:
        session.progress.line(f"old versions stay in the store for now: {fault}")


def commit_version(session: Session, head: Head, parent: ArtifactRef | None) -> Head:
    """Commit the policy after `head.update` and have the engine acknowledge it; the head with that version."""
    policy = commit_policy(
        session.run.stage("policy", head.step, [head.update]),
        session.trainer,
        session.config.sync,
        update=head.update,
        parent=parent,
        timeout_s=session.config.timeouts.sync_s,
    )
    new = Head(step=head.step, update=head.update, policy=policy)
    acknowledge(session, new)
    return new


def acknowledge(session: Session, head: Head) -> ArtifactRef:
    """The engine's acknowledgement of `head.policy`; an engine that is elsewhere is brought there first."""
    return sync_engine(
        session.ack_stage(head),
        session.rollout_engine,
        session.trainer,
        session.config.sync,
        update=head.update,
        policy=head.policy,
        vocab_size=session.vocab_size,
        timeout_s=session.config.timeouts.sync_s,
    )
