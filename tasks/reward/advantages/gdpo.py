"""Several rewards, each normalised in its group before they are added."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tasks.reward.advantage import Advantage, Rewards
from tasks.reward.groups import group_mean, group_std


class Gdpo(Advantage):
    """The sum over parts of (r_k - m_k) / (s_k + eps), then over its own deviation in the step.

    GDPO, arXiv:2601.05242. A part's weight scales its normalised value; of a reward of one part it is `grpo`'s,
    over the step's deviation.
    """

    compares: ClassVar[Literal["group", "batch"]] = "batch"

    eps: float = Field(1e-4, gt=0)
    """Added to the deviations."""

    def of(self, rewards: Rewards) -> np.ndarray:
        """See `Advantage`."""
        parts = rewards.parts or {"reward": rewards.values}
        total_U = np.zeros(len(rewards.values))
        for name, part_U in parts.items():
            centered_U = part_U - group_mean(part_U, rewards.groups)
            normalised_U = centered_U / (group_std(part_U, rewards.groups) + self.eps)
            total_U += rewards.weights.get(name, 1.0) * normalised_U
        spread = np.std(total_U, ddof=1) if len(total_U) > 1 else 0.0
        return (total_U - total_U.mean()) / (spread + self.eps)
