"""Proof of a sync: trainer and engine score the same probe, two implementations of one policy."""

import time
from typing import Protocol

import numpy as np

from infra.config import Config
from tasks.sync.config import SyncConfig


class Scorer(Protocol):
    """Anything that gives token logprobs."""

    def token_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """The logprob of each token but the first, at temperature 1."""
        ...


class SyncMismatch(RuntimeError):
    """Engine and trainer disagree about the policy: sampling on would train on the wrong policy."""


class ProbeResult(Config):
    """What a probe showed."""

    engine: list[list[float]]
    """The engine's logprobs."""
    max_diff: float
    """Largest |trainer - engine| over the probe (nats)."""


def probe_sequences(config: SyncConfig, vocab_size: int) -> list[list[int]]:
    """The probe batch: fixed pseudo-random tokens, so that it needs no data and is the same in every process."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (config.probe_sequences, config.probe_length)).tolist()


def score(engine: Scorer, sequences: list[list[int]]) -> tuple[list[list[float]], float]:
    """Run inside an engine's process: its logprobs of the probe, and the seconds that it took."""
    started = time.perf_counter()
    logprobs = [[float(value) for value in row] for row in engine.token_logprobs(sequences)]
    return logprobs, time.perf_counter() - started


def compare(trainer: list[list[float]], engine: list[list[float]], tolerance: float) -> ProbeResult:
    """Hold the engine's logprobs against the trainer's. Raises SyncMismatch beyond `tolerance` (or at a NaN)."""
    difference = float(np.abs(np.array(trainer) - np.array(engine)).max())
    if not difference <= tolerance:
        raise SyncMismatch(
            f"after the sync the engine's logprobs differ from the trainer's by {difference:.3g} nats "
            f"(sync.probe_tolerance is {tolerance:g}): the engine does not hold the published policy"
        )
    return ProbeResult(engine=engine, max_diff=difference)
