"""The group's advantage, over its mean reward: rare successes weigh more."""

import numpy as np
from pydantic import Field

from tasks.reward.advantage import Advantage, Rewards
from tasks.reward.groups import group_mean


class MaxRl(Advantage):
    """(r - m) / (m + eps), for rewards that are not negative: the gradient of the log of the success rate (MaxRL)."""

    eps: float = Field(1e-6, gt=0)
    """Added to the mean."""

    def of(self, rewards: Rewards) -> np.ndarray:
        """See `Advantage`."""
        mean_U = group_mean(rewards.values, rewards.groups)
        return (rewards.values - mean_U) / (mean_U + self.eps)
