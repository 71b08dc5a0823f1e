"""Proof of a sync: trainer and engine score the same probe, two implementations of one policy."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from infra.config import Config
from infra.errors import Mismatch
from infra.numerics.tolerance import Limits, difference
from tasks.sync.config import SyncConfig


class Scorer(Protocol):
    """Anything that gives token logprobs."""

    arithmetic: str
    """What it computes in: `float32`, `bfloat16`, `float16` or `mxfp8`."""
    repeatable: bool
    """Whether it, and another one like it, give the same bits whenever they are asked."""

    def token_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """The logprob of each token but the first, at temperature 1."""
        ...


class SyncMismatch(Mismatch):
    """Engine and trainer disagree about the policy: sampling on would train on the wrong policy."""


@dataclass(frozen=True)
class Scores:
    """What an engine or the trainer said of the probe."""

    logprobs: list[list[float]]
    arithmetic: str
    repeatable: bool


class ProbeResult(Config):
    """What a probe showed."""

    engine: Scores
    """The engine's."""
    max_diff: float
    """Largest |trainer - engine| over the probe (nats)."""
    mean_diff: float
    """Its mean."""


def probe_sequences(config: SyncConfig, vocab_size: int) -> list[list[int]]:
    """The probe batch: fixed pseudo-random tokens, so that it needs no data and is the same in every process."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (config.probe_sequences, config.probe_length)).tolist()


Span = tuple[float, float]
"""Begin and end of some work, in seconds since the epoch."""


def score(engine: Scorer, sequences: list[list[int]]) -> tuple[Scores, Span]:
    """Run inside an engine's process: its logprobs of the probe, and when it computed them."""
    began = time.time()
    logprobs = [[float(value) for value in row] for row in engine.token_logprobs(sequences)]
    return Scores(logprobs=logprobs, arithmetic=engine.arithmetic, repeatable=engine.repeatable), (began, time.time())


def busy_seconds(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans was going on."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def compare(trainer: Scores, engine: Scores, config: SyncConfig) -> ProbeResult:
    """Hold the engine's logprobs against the trainer's. Raises SyncMismatch when they are further apart than the settings, or
    what the two compute in, allow."""
    apart = difference(trainer.logprobs, engine.logprobs)
    if fault := apart.beyond(config.limits(trainer.arithmetic, engine.arithmetic)):
        raise SyncMismatch(
            f"after the sync the logprobs of the engine, which computes in {engine.arithmetic}, and of the trainer, in "
            f"{trainer.arithmetic}, differ by {fault}: the engine does not hold the committed policy; "
            "sync.probe_tolerance and sync.probe_mean_tolerance set what is allowed"
        )
    return ProbeResult(engine=engine, max_diff=apart.largest, mean_diff=apart.mean)


def compare_fresh(fresh: Scores, updated: Scores, config: SyncConfig) -> ProbeResult:
    """Hold a freshly loaded engine's logprobs against those of one that was updated: equal, where the device computes the
    same twice. Raises SyncMismatch."""
    apart = difference(fresh.logprobs, updated.logprobs)
    same = fresh.repeatable and updated.repeatable
    if fault := apart.beyond(Limits(0.0) if same else config.limits(fresh.arithmetic, updated.arithmetic)):
        raise SyncMismatch(
            f"the logprobs of an engine that was freshly loaded with the last version and of the one that was updated differ "
            f"by {fault}: an update did not reach every weight"
        )
    return ProbeResult(engine=fresh, max_diff=apart.largest, mean_diff=apart.mean)
