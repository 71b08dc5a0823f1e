"""What an advantage is: a pure function of rewards. Each is one file of tasks/reward/advantages/, or a file of yours."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from infra.config import Config
from infra.sources import find_idea, make_idea
from tasks.reward import advantages
from tasks.reward.config import RewardConfig
from tasks.reward.groups import are_mixed


@dataclass(frozen=True)
class Rewards:
    """What is compared: U samples, or turns of episodes (`reward.credit`)."""

    values: np.ndarray
    """float64 [U]"""
    groups: np.ndarray
    """int [U], from 0, without gaps: equal numbers are of one prompt."""
    lengths: np.ndarray
    """int [U]: tokens that the policy sampled."""
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float64 [U] of each part of the environment's reward; none for turns."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the parts, in the reward; 1 for one that is not named."""


class Advantage(Config):
    """An advantage; its fields are its settings (`reward.advantage_args`)."""

    compares: ClassVar[Literal["group", "batch"]] = "group"
    """group: samples of one prompt with each other; a group of equal rewards gets 0 exactly, no rounding noise over eps.
    batch: all of the step's."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Settings of `reward` that are its own, by these names."""

    @abstractmethod
    def of(self, rewards: Rewards) -> np.ndarray:
        """float64 [U]."""


def find_advantage(name_or_path: str) -> type[Advantage]:
    """The class of that name or path. Raises BadInput for one that there is not."""
    return find_idea(Advantage, advantages, name_or_path, "reward.advantage")


def advantage_of(config: RewardConfig) -> Advantage:
    """The advantage that the settings name. Raises BadInput for one that there is not, and for settings that it has not."""
    kind = find_advantage(config.advantage)
    given = {name: getattr(config, name) for name in kind.takes} | config.advantage_args
    return make_idea(kind, given, "reward.advantage_args")


def advantages_of(advantage: Advantage, rewards: Rewards, valid_U: np.ndarray) -> np.ndarray:
    """float32 [U] of rewards of which some are not valid: those get 0 and do not touch the others, whatever they are (NaN
    too). The groups' numbers may have gaps."""
    result_U = np.zeros(len(valid_U), dtype=np.float32)
    if not valid_U.any():
        return result_U
    values_V = rewards.values[valid_U].astype(np.float64)
    _, group_V = np.unique(rewards.groups[valid_U], return_inverse=True)
    parts = {name: part[valid_U].astype(np.float64) for name, part in rewards.parts.items()}
    found_V = advantage.of(Rewards(values_V, group_V, rewards.lengths[valid_U], parts, rewards.weights))
    if advantage.compares == "group":
        differs_G = are_mixed(values_V, group_V)
        found_V = np.where(differs_G[group_V], found_V, 0.0)
    result_U[valid_U] = found_V
    return result_U
