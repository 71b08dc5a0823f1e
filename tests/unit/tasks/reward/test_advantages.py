"""Group-relative advantages against their definitions."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tasks.reward.advantages import Kind, group_advantages, mixed_groups

EPS = 1e-4
rewards = st.floats(-10, 10, width=32)
groups_of_samples = st.integers(2, 40).flatmap(
    lambda n: st.tuples(
        hnp.arrays(np.float64, n, elements=rewards),
        hnp.arrays(np.int64, n, elements=st.integers(0, 4)),
        hnp.arrays(np.bool_, n),
    )
)
every_kind = pytest.mark.parametrize("kind", get_args(Kind))


def one_group(values: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(values), np.zeros(len(values), dtype=int), np.ones(len(values), dtype=bool)


@every_kind
@settings(max_examples=40)
@given(batch=groups_of_samples)
def test_a_groups_advantages_have_mean_zero(kind: Kind, batch: tuple[np.ndarray, np.ndarray, np.ndarray]):
    advantages, (_, groups, valid) = group_advantages(*batch, kind, EPS), batch
    for group in np.unique(groups[valid]):
        assert np.mean(advantages[valid & (groups == group)], dtype=float) == pytest.approx(0, abs=1e-4)


@every_kind
@settings(max_examples=40)
@given(batch=groups_of_samples, rubbish=st.sampled_from([np.nan, np.inf, -1e30, 5.0]))
def test_masked_samples_get_zero_and_change_nothing(kind: Kind, batch: tuple[np.ndarray, ...], rubbish: float):
    values, groups, valid = batch
    advantages = group_advantages(np.where(valid, values, rubbish), groups, valid, kind, EPS)
    assert not advantages[~valid].any()
    alone = group_advantages(values[valid], groups[valid], np.ones(valid.sum(), dtype=bool), kind, EPS)
    np.testing.assert_array_equal(advantages[valid], alone)


@settings(max_examples=40)
@given(batch=groups_of_samples, scale=st.floats(1, 100))
def test_scaling_the_rewards_scales_dr_grpo_and_leaves_grpo(batch: tuple[np.ndarray, ...], scale: float):
    values, groups, valid = batch
    plain = group_advantages(values, groups, valid, "dr_grpo", EPS)
    np.testing.assert_allclose(
        group_advantages(values * scale, groups, valid, "dr_grpo", EPS), plain * scale, rtol=1e-4, atol=1e-3
    )
    normalised = group_advantages(values, groups, valid, "grpo", 1e-12)
    np.testing.assert_allclose(
        group_advantages(values * scale, groups, valid, "grpo", 1e-12), normalised, rtol=1e-3, atol=1e-3
    )


def test_grpo_is_the_reward_less_the_mean_over_the_deviation():
    values = [0.0, 1.0, 1.0, 0.5]
    expected = (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + EPS)
    np.testing.assert_allclose(group_advantages(*one_group(values), "grpo", EPS), expected, rtol=1e-6)


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    values = [0.0, 1.0, 1.0, 0.5]
    expected = [v - (sum(values) - v) / 3 for v in values]
    np.testing.assert_allclose(group_advantages(*one_group(values), "rloo"), expected, rtol=1e-6)


def test_one_raising_of_four_leaves_three_and_a_masked_zero():
    values, groups, valid = one_group([1.0, 0.0, np.nan, 0.0])
    valid[2] = False
    np.testing.assert_allclose(
        group_advantages(values, groups, valid, "dr_grpo"), [2 / 3, -1 / 3, 0, -1 / 3], rtol=1e-6
    )


@every_kind
@pytest.mark.parametrize("values", [[0.1] * 7, [1.0], [0.0, 0.0]])
def test_equal_rewards_teach_exactly_nothing(kind: Kind, values: list[float]):
    assert not group_advantages(*one_group(values), kind, 1e-12).any()


@every_kind
def test_nothing_valid_is_all_zero(kind: Kind):
    values, groups, valid = one_group([np.nan, 1.0])
    assert group_advantages(values, groups, ~valid, kind).tolist() == [0.0, 0.0]


def test_groups_with_something_to_learn_are_told_from_the_others():
    groups, mixed = mixed_groups(np.array([1, 1, 0, 1.0]), np.array([3, 3, 5, 5]), np.ones(4, dtype=bool))
    assert (groups.tolist(), mixed.tolist()) == ([3, 5], [False, True])
