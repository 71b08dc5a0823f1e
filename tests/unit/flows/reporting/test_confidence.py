"""Intervals of accuracies and gains: right where the answer is known, and as wide as they claim."""

import numpy as np
import pytest
from scipy.stats import t

from flows.reporting.confidence import estimate, paired_gain
from infra.errors import BadInput


def test_the_interval_of_many_prompts_is_students():
    values = np.random.default_rng(1).uniform(0, 1, 400)
    found = estimate(list(values), 0.95)
    error = values.std(ddof=1) / np.sqrt(len(values))
    low, high = t.interval(0.95, len(values) - 1, values.mean(), error)
    assert found.mean == pytest.approx(values.mean())
    assert found.standard_error == pytest.approx(error)
    assert found.low == pytest.approx(low, abs=0.1 * error)
    assert found.high == pytest.approx(high, abs=0.1 * error)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        found = estimate(list(rng.binomial(8, 0.3, 60) / 8), 0.9)
        covered += found.low <= 0.3 <= found.high
    assert 0.84 <= covered / 200 <= 0.95


def test_a_higher_confidence_is_a_wider_interval():
    values = list(np.random.default_rng(3).uniform(0, 1, 50))
    narrow, wide = estimate(values, 0.5), estimate(values, 0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_the_same_values_give_the_same_interval():
    assert estimate([0.0, 0.5, 1.0], 0.95) == estimate([0.0, 0.5, 1.0], 0.95)


def test_equal_values_have_an_interval_without_width():
    found = estimate([1.0] * 5, 0.95)
    assert (found.mean, found.low, found.high, found.standard_error) == (1.0, 1.0, 1.0, 0.0)


def test_a_gain_is_paired_so_that_hard_prompts_do_not_blur_it():
    rng = np.random.default_rng(4)
    old = {str(i): float(rng.uniform()) for i in range(40)}
    new = {prompt: value + 0.05 for prompt, value in old.items()}
    gain = paired_gain(new, old, 0.95)
    assert gain.mean == pytest.approx(0.05)
    assert gain.low == pytest.approx(0.05)  # unpaired, it would be far below 0


def test_a_gain_over_other_prompts_is_refused():
    with pytest.raises(BadInput, match="2 prompts that are not in both"):
        paired_gain({"a": 1.0, "b": 0.0}, {"a": 1.0, "c": 0.0}, 0.95)
    with pytest.raises(BadInput, match="at least 2"):
        paired_gain({"a": 1.0}, {"a": 0.0}, 0.95)


def test_where_nothing_could_be_judged_there_is_no_accuracy():
    with pytest.raises(BadInput, match="no sample of any prompt could be judged"):
        estimate([], 0.95)
