"""The group's advantage, without a division."""

import numpy as np

from tasks.reward.advantage import Advantage, Rewards
from tasks.reward.groups import group_mean


class DrGrpo(Advantage):
    """r - m, m the mean of the group's rewards; arXiv:2503.20783."""

    def of(self, rewards: Rewards) -> np.ndarray:
        """See `Advantage`."""
        return rewards.values - group_mean(rewards.values, rewards.groups)
