"""The group's advantage, normalised."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from tasks.reward.advantage import Advantage, Rewards
from tasks.reward.groups import group_mean, group_std


class Grpo(Advantage):
    """(r - m) / (s + std_eps), m and s the mean and the standard deviation (n - 1) of the group's rewards.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2, with the deviation that TRL and verl take.
    """

    takes: ClassVar[tuple[str, ...]] = ("std_eps",)

    std_eps: float = Field(1e-4, gt=0)
    """Added to the deviation; default: `reward.std_eps`."""

    def of(self, rewards: Rewards) -> np.ndarray:
        """See `Advantage`."""
        centered_U = rewards.values - group_mean(rewards.values, rewards.groups)
        return centered_U / (group_std(rewards.values, rewards.groups) + self.std_eps)
