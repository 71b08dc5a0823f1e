"""REINFORCE++: rewards normalised over the whole step."""

from typing import ClassVar, Literal

import numpy as np

from tasks.reward.advantage import Advantage, Rewards


class ReinforcePp(Advantage):
    """(r - m) / sqrt(v + 1e-8), m and v the mean and variance (n - 1) over all tokens of the step.

    arXiv:2501.03262, with discount 1 and no KL in the reward. One sample a prompt is enough.
    """

    compares: ClassVar[Literal["group", "batch"]] = "batch"

    def of(self, rewards: Rewards) -> np.ndarray:
        """See `Advantage`."""
        return whitened(rewards.values, rewards.lengths)


def whitened(values_U: np.ndarray, lengths_U: np.ndarray) -> np.ndarray:
    """float64 [U] of mean 0 and variance 1 over tokens, of which each value has `lengths_U`."""
    weight_U = np.maximum(lengths_U, 1).astype(np.float64)
    total = weight_U.sum()
    centered_U = values_U - (weight_U * values_U).sum() / total
    variance = (weight_U * centered_U**2).sum() / max(total - 1, 1)
    return centered_U / np.sqrt(variance + 1e-8)
