"""Group-relative advantages."""

from typing import Literal

import numpy as np

Kind = Literal["grpo", "dr_grpo", "rloo"]


def group_advantages(
    rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, kind: Kind = "grpo", eps: float = 1e-4
) -> np.ndarray:
    """Advantages (float32 [N]) of rewards (float [N]) within their groups (int [N]; equal numbers are one group).

    With m and s the mean and the standard deviation (of a sample: n - 1) of the group's valid rewards:
    - grpo: (r - m) / (s + eps); DeepSeekMath, arXiv 2402.03300, section 4.1.2, with the deviation that TRL and verl take.
    - dr_grpo: r - m; arXiv 2503.20783.
    - rloo: r - mean of the others = n / (n - 1) * (r - m); arXiv 2402.14740.
    Invalid samples get 0 and do not touch the others, whatever their reward (NaN too). A sample that is alone in its group
    gets 0, and so does a group of equal rewards: 0 exactly, no rounding noise divided by eps.
    """
    advantages_N = np.zeros(len(rewards_N), dtype=np.float64)
    if not valid_N.any():
        return advantages_N.astype(np.float32)
    rewards_V = rewards_N[valid_N].astype(np.float64)
    _, group_V = np.unique(groups_N[valid_N], return_inverse=True)
    size_V = np.bincount(group_V)[group_V]
    centered_V = rewards_V - (np.bincount(group_V, rewards_V) / np.bincount(group_V))[group_V]
    others_V = np.maximum(size_V - 1, 1)
    if kind == "grpo":
        std_V = np.sqrt(np.bincount(group_V, centered_V**2)[group_V] / others_V)
        scaled_V = centered_V / (std_V + eps)
    elif kind == "rloo":
        scaled_V = centered_V * size_V / others_V
    else:
        scaled_V = centered_V
    advantages_N[valid_N] = np.where(_mixed(rewards_V, group_V)[group_V], scaled_V, 0.0)
    return advantages_N.astype(np.float32)


def mixed_groups(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(groups [G], mixed bool [G]): whether a group's valid rewards differ, so that there is something to learn."""
    groups_G, group_V = np.unique(groups_N[valid_N], return_inverse=True)
    return groups_G, _mixed(rewards_N[valid_N], group_V)


def _mixed(rewards_V: np.ndarray, group_V: np.ndarray) -> np.ndarray:
    count = int(group_V.max(initial=-1)) + 1
    low_G, high_G = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low_G, group_V, rewards_V)
    np.maximum.at(high_G, group_V, rewards_V)
    return high_G > low_G
