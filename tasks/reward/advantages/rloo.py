"""Leave one out."""

import numpy as np

from tasks.reward.advantage import Advantage, Rewards
from tasks.reward.groups import group_mean, group_size


class Rloo(Advantage):
    """r - mean of the group's others = n / (n - 1) (r - m); arXiv:2402.14740."""

    def of(self, rewards: Rewards) -> np.ndarray:
        """See `Advantage`."""
        size_U = group_size(rewards.groups)
        centered_U = rewards.values - group_mean(rewards.values, rewards.groups)
        return centered_U * size_U / np.maximum(size_U - 1, 1)
