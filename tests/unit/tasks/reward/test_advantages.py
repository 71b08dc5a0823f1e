"""Group-relative advantages against their definitions."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from infra.sources import known_ideas
from tasks.reward import advantages
from tasks.reward.advantage import Rewards, advantage_of, advantages_of
from tasks.reward.config import RewardConfig
from tasks.reward.groups import mixed_groups

EPS = 1e-4
rewards = st.floats(-10, 10, width=32)
groups_of_samples = st.integers(2, 40).flatmap(
    lambda n: st.tuples(
        hnp.arrays(np.float64, n, elements=rewards),
        hnp.arrays(np.int64, n, elements=st.integers(0, 4)),
        hnp.arrays(np.bool_, n),
    )
)
KINDS = known_ideas(advantages)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_kind_of_groups = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if advantage_of(RewardConfig(advantage=kind)).compares == "group"]
)


def advantages_by(
    kind: str,
    values: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray,
    eps: float = EPS,
    lengths: np.ndarray | None = None,
    **more,
) -> np.ndarray:
    advantage = advantage_of(RewardConfig(advantage=kind, std_eps=eps))
    lengths = np.ones(len(values), dtype=int) if lengths is None else lengths
    return advantages_of(advantage, Rewards(values, groups, lengths, **more), valid)


def by_group(found: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> list[np.ndarray]:
    return [found[valid & (groups == group)].astype(float) for group in np.unique(groups[valid])]


def one_group(values: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(values), np.zeros(len(values), dtype=int), np.ones(len(values), dtype=bool)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@settings(max_examples=40)
@given(batch=groups_of_samples)
def test_a_groups_advantages_have_mean_zero(kind: str, batch: tuple[np.ndarray, np.ndarray, np.ndarray]):
    for of_group in by_group(advantages_by(kind, *batch), *batch[1:]):
        assert of_group.mean() == pytest.approx(0, abs=1e-4)


@settings(max_examples=40)
@given(batch=groups_of_samples)
def test_maxrls_advantages_have_mean_zero_whatever_it_divides_by(batch: tuple[np.ndarray, np.ndarray, np.ndarray]):
    values, groups, valid = batch
    for of_group in by_group(advantages_by("maxrl", np.abs(values), groups, valid), groups, valid):
        assert of_group.mean() == pytest.approx(0, abs=1e-4 * max(1, abs(of_group).max()))


@every_kind
@settings(max_examples=40)
@given(batch=groups_of_samples, rubbish=st.sampled_from([np.nan, np.inf, -1e30, 5.0]))
def test_masked_samples_get_zero_and_change_nothing(kind: str, batch: tuple[np.ndarray, ...], rubbish: float):
    values, groups, valid = batch
    found = advantages_by(kind, np.where(valid, values, rubbish), groups, valid)
    assert not found[~valid].any()
    alone = advantages_by(kind, values[valid], groups[valid], np.ones(valid.sum(), dtype=bool))
    np.testing.assert_array_equal(found[valid], alone)


@settings(max_examples=40)
@given(batch=groups_of_samples, scale=st.floats(1, 100))
def test_scaling_the_rewards_scales_dr_grpo_and_leaves_grpo(batch: tuple[np.ndarray, ...], scale: float):
    values, groups, valid = batch
    plain = advantages_by("dr_grpo", values, groups, valid, EPS)
    np.testing.assert_allclose(
        advantages_by("dr_grpo", values * scale, groups, valid, EPS), plain * scale, rtol=1e-4, atol=1e-3
    )
    normalised = advantages_by("grpo", values, groups, valid, 1e-12)
    np.testing.assert_allclose(
        advantages_by("grpo", values * scale, groups, valid, 1e-12), normalised, rtol=1e-3, atol=1e-3
    )


def test_grpo_is_the_reward_less_the_mean_over_the_deviation():
    values = [0.0, 1.0, 1.0, 0.5]
    expected = (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + EPS)
    np.testing.assert_allclose(advantages_by("grpo", *one_group(values)), expected, rtol=1e-6)


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    values = [0.0, 1.0, 1.0, 0.5]
    expected = [v - (sum(values) - v) / 3 for v in values]
    np.testing.assert_allclose(advantages_by("rloo", *one_group(values)), expected, rtol=1e-6)


def test_one_raising_of_four_leaves_three_and_a_masked_zero():
    values, groups, valid = one_group([1.0, 0.0, np.nan, 0.0])
    valid[2] = False
    np.testing.assert_allclose(advantages_by("dr_grpo", values, groups, valid), [2 / 3, -1 / 3, 0, -1 / 3], rtol=1e-6)


@every_kind_of_groups
@pytest.mark.parametrize("values", [[0.1] * 7, [1.0], [0.0, 0.0]])
def test_equal_rewards_teach_exactly_nothing(kind: str, values: list[float]):
    assert not advantages_by(kind, *one_group(values), 1e-12).any()


@every_kind
def test_nothing_valid_is_all_zero(kind: str):
    values, groups, valid = one_group([np.nan, 1.0])
    assert advantages_by(kind, values, groups, ~valid).tolist() == [0.0, 0.0]


def test_groups_with_something_to_learn_are_told_from_the_others():
    groups, mixed = mixed_groups(np.array([1, 1, 0, 1.0]), np.array([3, 3, 5, 5]), np.ones(4, dtype=bool))
    assert (groups.tolist(), mixed.tolist()) == ([3, 5], [False, True])


def test_opo_subtracts_the_mean_weighted_by_length():
    values, lengths = np.array([0.0, 1.0, 1.0]), np.array([10, 1, 5])
    found = advantages_by("opo", *one_group(values.tolist()), lengths=lengths)
    np.testing.assert_allclose(found, values - 6 / 16, rtol=1e-6)


def test_maxrl_divides_by_the_mean():
    np.testing.assert_allclose(advantages_by("maxrl", *one_group([0.0, 0.0, 0.0, 1.0])), [-1, -1, -1, 3], rtol=1e-5)


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_is_normalised_over_all_tokens(kind: str):
    values, groups, lengths = np.array([0.0, 1.0, 5.0]), np.array([0, 0, 1]), np.array([2, 3, 4])
    found = advantages_by(kind, values, groups, np.ones(3, dtype=bool), lengths=lengths)
    means = np.array([0.5, 0.5, 5.0]) if kind == "reinforce_pp_baseline" else np.zeros(3)
    tokens = np.repeat(values - means, lengths)
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.repeat(found, lengths), expected, rtol=1e-5)


def test_gdpo_normalises_each_part_before_it_adds():
    right, short = np.array([0.0, 1.0, 0.0, 1.0]), np.array([10.0, 10.0, 20.0, 40.0])
    parts, weights = {"right": right, "short": short}, {"short": 0.5}
    found = advantages_by("gdpo", *one_group((right + 0.5 * short).tolist()), parts=parts, weights=weights)
    total = (right - 0.5) / (right.std(ddof=1) + EPS) + 0.5 * (short - 20) / (short.std(ddof=1) + EPS)
    np.testing.assert_allclose(found, (total - total.mean()) / (total.std(ddof=1) + EPS), rtol=1e-5)


def test_one_sample_a_prompt_is_enough_where_the_step_is_compared():
    found = advantages_by("reinforce_pp", np.array([0.0, 1.0]), np.array([0, 1]), np.ones(2, dtype=bool))
    assert found[0] < 0 < found[1]


MINE = """
from typing import ClassVar
from tasks.reward.advantage import Advantage, Rewards

class Mine(Advantage):
    compares: ClassVar = "batch"
    shift: float = 0.5

    def of(self, rewards: Rewards):
        return rewards.values - self.shift
"""


def test_a_file_of_ones_own_is_an_advantage(tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    config = RewardConfig(advantage=str(tmp_path / "mine.py"), advantage_args={"shift": 0.25})
    rewards = Rewards(np.array([1.0, 0.0]), np.array([0, 1]), np.ones(2, dtype=int))
    assert advantages_of(advantage_of(config), rewards, np.ones(2, dtype=bool)).tolist() == [0.75, -0.25]
    assert re.fullmatch(r"mine@[0-9a-f]{32}", config.stored()["advantage"])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"advantage": "gpro"}, "there is no 'gpro'; did you mean grpo"),
        ({"advantage": "gae.py"}, "gae.py: no such file"),
        ({"advantage": "rloo", "advantage_args": {"k": 1}}, "reward.advantage_args.k: .*it has none"),
    ],
)
def test_an_advantage_that_there_is_not_is_named(settings, told):
    with pytest.raises(ValueError, match=told):
        advantage_of(RewardConfig(**settings))
