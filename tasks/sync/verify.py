"""Proof of a sync: trainer and engine score the same probe, two implementations of one policy."""

import time
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from infra.config import Config
from infra.errors import Mismatch
from tasks.sync.config import SyncConfig


class Scorer(Protocol):
    """Anything that gives token logprobs."""

    def token_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """The logprob of each token but the first, at temperature 1."""
        ...


class SyncMismatch(Mismatch):
    """Engine and trainer disagree about the policy: sampling on would train on the wrong policy."""


class ProbeResult(Config):
    """What a probe showed."""

    engine: list[list[float]]
    """The engine's logprobs."""
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


def score(engine: Scorer, sequences: list[list[int]]) -> tuple[list[list[float]], Span]:
    """Run inside an engine's process: its logprobs of the probe, and when it computed them."""
    began = time.time()
    logprobs = [[float(value) for value in row] for row in engine.token_logprobs(sequences)]
    return logprobs, (began, time.time())


def busy_seconds(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans was going on."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def compare(
    trainer: list[list[float]], engine: list[list[float]], tolerance: float, mean_tolerance: float | None = None
) -> ProbeResult:
    """Hold the engine's logprobs against the trainer's. Raises SyncMismatch when one differs by more than `tolerance`, or all
    in the mean by more than `mean_tolerance` (or at a NaN)."""
    differences = np.abs(np.array(trainer) - np.array(engine))
    largest, mean = float(differences.max()), float(differences.mean())
    limits = [
        ("probe_tolerance", "", largest, tolerance),
        ("probe_mean_tolerance", " in the mean", mean, mean_tolerance),
    ]
    for setting, how, difference, limit in limits:
        if limit is not None and not difference <= limit:
            raise SyncMismatch(
                f"after the sync the engine's logprobs differ from the trainer's by {difference:.3g} nats{how} "
                f"(sync.{setting} is {limit:g}): the engine does not hold the published policy"
            )
    return ProbeResult(engine=engine, max_diff=largest, mean_diff=mean)
