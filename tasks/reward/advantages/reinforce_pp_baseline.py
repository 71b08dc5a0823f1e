"""REINFORCE++ with the group's mean as its baseline."""

from typing import ClassVar, Literal

import numpy as np

from tasks.reward.advantage import Advantage, Rewards
from tasks.reward.advantages.reinforce_pp import whitened
from tasks.reward.groups import group_mean


class ReinforcePpBaseline(Advantage):
    """r minus the mean of the group's, then normalised over all tokens of the step; arXiv:2501.03262."""

    compares: ClassVar[Literal["group", "batch"]] = "batch"

    def of(self, rewards: Rewards) -> np.ndarray:
        """See `Advantage`."""
        return whitened(rewards.values - group_mean(rewards.values, rewards.groups), rewards.lengths)
