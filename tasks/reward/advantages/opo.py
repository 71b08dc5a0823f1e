"""The baseline of least variance."""

import numpy as np

from tasks.reward.advantage import Advantage, Rewards
from tasks.reward.groups import group_mean


class Opo(Advantage):
    """r - sum(l r) / sum(l), l the lengths of the group's responses.

    On-policy RL with the optimal baseline, arXiv:2505.23585, where a response's squared gradient grows as its length.
    """

    def of(self, rewards: Rewards) -> np.ndarray:
        """See `Advantage`."""
        weight_U = np.maximum(rewards.lengths, 1).astype(np.float64)
        mean_U = group_mean(weight_U * rewards.values, rewards.groups) / group_mean(weight_U, rewards.groups)
        return rewards.values - mean_U
