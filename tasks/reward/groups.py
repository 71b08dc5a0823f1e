"""Means and differences within groups: the samples of one prompt, say."""

import numpy as np


def group_mean(values_V: np.ndarray, group_V: np.ndarray) -> np.ndarray:
    """float64 [V]: the mean of each value's group. group_V: int, from 0, without gaps."""
    return (np.bincount(group_V, values_V) / np.bincount(group_V))[group_V]


def group_size(group_V: np.ndarray) -> np.ndarray:
    """int [V]: how many each one's group has."""
    return np.bincount(group_V)[group_V]


def group_std(values_V: np.ndarray, group_V: np.ndarray) -> np.ndarray:
    """float64 [V]: the standard deviation of a sample (n - 1) of each value's group; 0 where it is alone."""
    centered_V = values_V - group_mean(values_V, group_V)
    squares_V = np.bincount(group_V, centered_V**2)[group_V]
    return np.sqrt(squares_V / np.maximum(group_size(group_V) - 1, 1))


def mixed_groups(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(groups [G], mixed bool [G]): whether a group's valid rewards differ, so that there is something to learn."""
    groups_G, group_V = np.unique(groups_N[valid_N], return_inverse=True)
    return groups_G, are_mixed(rewards_N[valid_N], group_V)


def are_mixed(rewards_V: np.ndarray, group_V: np.ndarray) -> np.ndarray:
    """bool [G]: whether the rewards of a group differ."""
    count = int(group_V.max(initial=-1)) + 1
    low_G, high_G = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low_G, group_V, rewards_V)
    np.maximum.at(high_G, group_V, rewards_V)
    return high_G > low_G
