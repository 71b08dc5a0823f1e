"""Which prompts a step trains on: a pure function of the step's number, so that resuming needs no saved position."""

import hashlib

import numpy as np


def steps_per_epoch(n: int, prompts_per_step: int) -> int:
    """Steps in which every one of `n` prompts comes up once."""
    if n < 1 or prompts_per_step < 1:
        raise ValueError(f"n ({n}) and prompts_per_step ({prompts_per_step}) must be positive")
    return -(-n // prompts_per_step)


def step_rows(n: int, prompts_per_step: int, seed: int, step: int) -> list[int]:
    """Row numbers (at most prompts_per_step) of a step's prompts, among `n`; `step` counts from 0.

    Every epoch is whole: it starts with a step of its own and holds every prompt once, in an order drawn by
    (seed, epoch). Where n is no multiple of prompts_per_step, the epoch's steps are of nearly equal size (65 prompts by
    64: 33 and 32) instead of a last one of a prompt or two, whose noisy gradient Adam would follow with a full-sized step.
    """
    if step < 0:
        raise ValueError(f"step ({step}) must not be negative")
    steps = steps_per_epoch(n, prompts_per_step)
    epoch, index = divmod(step, steps)
    return np.array_split(_permutation(n, seed, epoch), steps)[index].tolist()


def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    # Hashed, because with seed + epoch a run with seed 1 would repeat the second epoch of seed 0. RandomState, because
    # NumPy promises its stream to stay the same across versions, and that of its newer generators not.
    words = np.frombuffer(hashlib.sha256(f"epoch:{seed}:{epoch}".encode()).digest(), dtype="<u4")
    return np.random.RandomState(words).permutation(n)
