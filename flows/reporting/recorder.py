"""What a train run tells: progress lines, MLflow, Prefect's artifacts, report.json and the reward curve."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.reporting import pages, report
from flows.session import Session
from flows.versions import updates_of
from infra.orchestration.assets import record_asset
from infra.orchestration.events import PolicyCommitted, RunFinished, emit
from infra.runs.run import Head
from infra.storage.artifacts import ArtifactRef, open_artifact

TIMING_FIGURES = ("overhead_share", "step_seconds", "tokens_per_s", "rollout_update_tokens_per_s", "outside_seconds")
PICTURE_EVERY = 5
"""Steps between pictures of the curves."""
IDLE = ("updated", "lr", "loss_tokens", "model_tokens", "trained_samples", "skipped_samples")
"""What is known of an update in which no sample had a gradient."""
Times = Callable[[str, str], AbstractContextManager[None]]


@dataclass
class Timing:
    """Where a step's time went, in seconds."""

    wall: float
    """From the step's begin to its last record."""
    stages: dict[str, float]
    """Wall time of each stage, as the flow sees it."""
    engine: dict[str, float]
    """Of each stage: in the engine itself."""
    tokens: float
    """Prompt and response tokens of the step's samples."""


class Recorder:
    """The history of a run, rebuilt from the store's artifacts when the run is resumed."""

    def __init__(self, session: Session, dataset: ArtifactRef, head: Head):
        self.session, self.dataset = session, dataset
        self.heldout: dict[str, dict[str, float]] = {}
        self.history = [committed_step(update) for update in updates_of(head)[1:]]
        self.before = session.run.read_json("report.json") or {}
        self.timings: list[Timing] = []
        self.last: dict[str, float] = {}
        self.steps = max(session.config.steps, head.step)  # what is committed is not taken back
        self.prompts = {
            row["prompt_id"]: report.prompt_text(row) for row in open_artifact(dataset).table("train").to_pylist()
        }
        self.progress_id: Any = create_progress_artifact(
            progress=100 * head.step / self.steps,
            key=f"{session.pages}-progress",
            description=f"Steps of {session.run.name}",
        )
        for entry in self.history:  # what MLflow has not got of them: a lost step, or all, where its run was deleted
            session.tracker.step(entry["step"] + 1, entry["metrics"], entry["refs"])
        self.flow_runs = pages.note_flow_run(session.run)
        where = f"resumed at step {head.step}" if session.resumed and head.step else "new"
        session.progress.line(f"run {session.run.name} ({where}), {self.steps} steps, store {session.run.store}")
        if self.steps > session.config.steps:
            session.progress.line(
                f"steps={session.config.steps}: {head.step} are committed already, and none is taken back"
            )

    @contextmanager
    def step(self, step: int) -> Iterator[Times]:
        """Time a step; yields a context manager that times a stage of it."""
        seconds: dict[str, float] = {}

        @contextmanager
        def stage(name: str, what: str) -> Iterator[None]:
            started = time.perf_counter()
            with self.session.progress.waiting(f"step {step + 1}/{self.steps}: {what}", phase=what):
                yield
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started

        self.started = time.perf_counter()
        yield stage
        self.last = seconds

    def record(self, head: Head) -> None:
        """Tell about the step that `head` has just committed."""
        session, step = self.session, head.step - 1
        entry = committed_step(head.update)
        metrics = entry["metrics"]
        metrics |= {f"seconds/{name}": value for name, value in self.last.items()}
        samples = report.step_samples(entry["refs"]["scored"], self.prompts)
        name, title = session.pages, f"Step {step + 1} of {session.run.name}"
        markdown = report.step_markdown(step, metrics, samples, entry["refs"]["scored"])
        create_markdown_artifact(markdown, key=f"{name}-step-{step + 1:05d}", description=title)
        create_table_artifact(samples, key=f"{name}-samples", description=title)
        update_progress_artifact(self.progress_id, progress=100 * head.step / self.steps)
        wall = time.perf_counter() - self.started
        ack = session.ack_stage(head).committed()
        assert ack is not None, "a head moves after the acknowledgement"
        in_sync = [open_artifact(ref).manifest.provenance["engine_s"] for ref in (head.policy, ack)]
        engine = entry["engine_s"] | {"sync": sum(in_sync)}
        # A stage that was found in the store, on a resume, took its engine's time in another process.
        engine = {stage: min(seconds, self.last[stage]) for stage, seconds in engine.items()}
        self.timings.append(Timing(wall, dict(self.last), engine, metrics["rollout/tokens"]))
        metrics |= {"seconds/step": wall, "tokens_per_s": metrics["rollout/tokens"] / wall}
        self.history.append(entry)
        if head.step % PICTURE_EVERY == 0:
            self._picture()
        announce(session, head, metrics["reward/mean"])
        session.tracker.step(head.step, metrics, entry["refs"] | {"policy": head.policy})
        remaining = self.steps - head.step
        eta = remaining * statistics.mean(timing.wall for timing in self.timings[-5:])
        session.progress.line(report.step_line(step, self.steps, metrics, eta))
        self._write(head)

    def finish(self, head: Head) -> dict[str, Any]:
        """The report of a finished run, with its picture, in the run's folder, MLflow and Prefect."""
        session = self.session
        picture = report.reward_curve(self.history, {when: values["accuracy"] for when, values in self.heldout.items()})
        session.run.write_bytes("reward.png", picture)
        values = self._write(head)
        figures = {name: value for name, value in values.items() if isinstance(value, int | float)}
        session.tracker.summary(figures, {"policy": head.policy}, picture)
        self._picture()
        links = pages.run_links(session, self.flow_runs, head)
        create_markdown_artifact(
            report.run_markdown(session.run.name, links, values, self.history),
            key=f"{session.pages}-report",
            description=f"Report of {session.run.name}",
        )
        conclude(session, head, self.dataset, values)
        session.run.write_json("report.json", values | {"complete": True})
        tell_end(session, values)
        return values

    def _picture(self) -> None:
        """The curves so far, as a picture in Prefect."""
        create_image_artifact(
            report.data_url(report.curves(self.history)),
            key=f"{self.session.pages}-curves",
            description=f"Curves of {self.session.run.name}",
        )

    def _write(self, head: Head) -> dict[str, Any]:
        rewards = [entry["metrics"]["reward/mean"] for entry in self.history]
        k3 = [entry["metrics"]["update/k3_mean"] for entry in self.history if "update/k3_mean" in entry["metrics"]]
        values = {
            "run": self.session.run.name,
            "steps": head.step,
            "steps_wanted": self.steps,
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "reward_first": rewards[0] if rewards else None,
            "reward_last": rewards[-1] if rewards else None,
            "reward_last_5": statistics.mean(rewards[-5:]) if rewards else None,
            "heldout_before": self.heldout.get("before", {}).get("accuracy"),
            "heldout_after": self.heldout.get("after", {}).get("accuracy"),
            "idle_steps": sum(bool(report.nothing_learned(entry["metrics"])) for entry in self.history),
            "k3_mean": sum(k3) / len(k3) if k3 else None,
            "seconds": self.before.get("seconds", 0.0) + time.monotonic() - self.session.opened,
            "peak_rss_gib": max(self.before.get("peak_rss_gib", 0.0), self.session.progress.peak_rss_bytes / 2**30),
            **(timing_figures(self.timings) or {name: self.before.get(name) for name in TIMING_FIGURES}),
            "policy_digest": open_artifact(head.policy).metadata["policy_digest"],
            "policy": head.policy.model_dump(),
        }
        self.session.run.write_json("report.json", values)
        return values


def finished_report(session: Session) -> dict[str, Any] | None:
    """The report of a run that has nothing left to do, told again; None if it has."""
    values = session.run.read_json("report.json") or {}
    if not values.get("complete") or values["steps"] < session.config.steps:
        return None
    name, done, wanted = session.run.name, values["steps"], session.config.steps
    fewer = f"; it has {done} steps, more than steps={wanted}, and none is taken back" if wanted < done else ""
    session.progress.line(f"run {name} was complete already: nothing is done{fewer}; steps above {done} continue it")
    tell_end(session, values)
    return values


def tell_end(session: Session, values: dict[str, Any]) -> None:
    """The summary at the end of a run, for a person."""
    folder = f"{session.run.store}/runs/{session.run.name}"
    for line in report.summary_lines(values, folder, session.tracker.uri, session.tracker.run_id):
        session.progress.line(line)


def announce(session: Session, head: Head, reward: float) -> None:
    """The event of a version that has just been committed."""
    run = session.run
    emit(PolicyCommitted(run=run.name, store=run.store, version=head.step, policy=head.policy, reward=reward))


def conclude(session: Session, head: Head, dataset: ArtifactRef, values: dict[str, Any]) -> None:
    """The asset of the final policy, and the event of a finished run."""
    run = session.run
    record_asset(
        head.policy,
        name=f"{run.name} version {head.step}",
        description=f"Policy of run {run.name} after {head.step} steps",
        upstream=[dataset],
        metadata={"run": run.name, "version": head.step, "digest": values["policy_digest"]},
    )
    ends = {"heldout_before": values["heldout_before"], "heldout_after": values["heldout_after"]}
    emit(RunFinished(run=run.name, store=run.store, steps=head.step, policy=head.policy, **ends))


def timing_figures(timings: list[Timing]) -> dict[str, Any]:
    """Share of the wall time outside the engines, medians a step, and the seconds outside the engines by stage."""
    if not timings:
        return {}
    wall = sum(timing.wall for timing in timings)
    outside = {
        stage: statistics.median(timing.stages[stage] - timing.engine[stage] for timing in timings)
        for stage in timings[0].stages
    }
    outside["records"] = statistics.median(timing.wall - sum(timing.stages.values()) for timing in timings)
    return {
        "overhead_share": 1 - sum(sum(timing.engine.values()) for timing in timings) / wall,
        "step_seconds": statistics.median(timing.wall for timing in timings),
        "tokens_per_s": statistics.median(timing.tokens / timing.wall for timing in timings),
        "rollout_update_tokens_per_s": statistics.median(
            timing.tokens / (timing.stages["rollout"] + timing.stages["update"]) for timing in timings
        ),
        "outside_seconds": outside,
    }


def warm_start_line(update: ArtifactRef) -> str:
    """What a person is told of a warm start."""
    metrics = open_artifact(update).metadata["metrics"]
    return "warm start: {steps:.0f} supervised steps, loss {loss_first:.2f} -> {loss_last:.2f} nats a token".format(
        **metrics
    )


def committed_step(update: ArtifactRef) -> dict[str, Any]:
    """What the store knows of a committed step: its number, metrics, refs and the engines' seconds."""
    manifest = open_artifact(update).manifest
    scored = manifest.inputs[1]
    scored_manifest = open_artifact(scored).manifest
    rollouts = scored_manifest.inputs[0]
    rollout_manifest = open_artifact(rollouts).manifest
    metrics = {
        **_numbers("rollout", rollout_manifest.metadata),
        **{_reward_metric(name): v for name, v in scored_manifest.metadata["metrics"].items()},
        **_numbers("update", _measured(manifest.metadata["metrics"])),
    }
    manifests = {"rollout": rollout_manifest, "reward": scored_manifest, "update": manifest}
    return {
        "step": manifest.metadata["step"],
        "metrics": metrics,
        "refs": {"rollouts": rollouts, "scored": scored, "update": update},
        "engine_s": {stage: m.provenance["engine_s"] for stage, m in manifests.items()},
    }


def _reward_metric(name: str) -> str:
    """The metric's name; stores of before call the share of groups with differing rewards like a count."""
    return "reward/groups_mixed_share" if name == "groups_mixed" else f"reward/{name.removeprefix('reward_')}"


def _measured(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without the zeros that stand for nothing where no sample had a gradient, and the update did nothing."""
    return metrics if metrics.get("updated", 1.0) else {name: metrics[name] for name in IDLE if name in metrics}


def _numbers(prefix: str, values: dict[str, Any]) -> dict[str, float]:
    return {f"{prefix}/{name}": float(v) for name, v in values.items() if isinstance(v, int | float)}
