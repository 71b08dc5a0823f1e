"""Minibatches: every sample once an epoch, prompts whole, the same whenever a step is replayed; reductions by definition."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tasks.update.batch import Sample
from tasks.update.config import UpdateConfig
from tasks.update.minibatches import optimizer_steps
from tasks.update.reductions import token_scales


def sample(row: int, prompt: int, length: int = 2) -> Sample:
    return Sample(
        row, np.array([prompt]), np.ones(length), np.zeros(length), np.ones(length, dtype=bool), np.ones(length)
    )


batches = st.lists(st.integers(0, 5), min_size=1, max_size=20).map(
    lambda ps: [sample(row, p) for row, p in enumerate(ps)]
)


@given(batches, st.integers(2, 6), st.integers(1, 3), st.integers(0, 99))
def test_an_epoch_has_every_sample_once_and_prompts_whole(samples, minibatches, epochs, seed):
    steps = optimizer_steps(samples, minibatches, epochs, seed)
    per_epoch = len(steps) // epochs
    assert per_epoch == min(minibatches, len({int(one.prompt[0]) for one in samples}))
    for epoch in range(epochs):
        parts = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(one.row for part in parts for one in part) == [one.row for one in samples]
        prompts = [{int(one.prompt[0]) for one in part} for part in parts]
        assert sum(map(len, prompts)) == len(set().union(*prompts))
        assert all([one.row for one in part] == sorted(one.row for one in part) for part in parts)
    again = optimizer_steps(samples, minibatches, epochs, seed)
    assert [[one.row for one in part] for part in steps] == [[one.row for one in part] for part in again]


def test_one_minibatch_is_the_batch_as_it_is():
    samples = [sample(0, 3), sample(1, 1)]
    assert optimizer_steps(samples, 1, 2, 7) == [samples, samples]


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({"reduction": "token_mean"}, None),
        ({"reduction": "sequence_mean"}, {0: 1 / (2 * 2), 1: 1 / (2 * 6)}),
        ({"reduction": "sequence_sum"}, {0: 1 / 2, 1: 1 / 2}),
        ({"reduction": "fixed", "reduction_length": 24}, {0: 1 / (2 * 24), 1: 1 / (2 * 24)}),
    ],
)
def test_a_reduction_is_a_tokens_weight(settings, scales):
    masked = sample(2, 1, 3)
    masked.mask[:] = False
    samples = [sample(0, 0, 2), sample(1, 0, 6), masked]
    config = UpdateConfig(**settings)
    assert token_scales(samples, config) == scales


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reduction": "fixed"}, "reduction_length"),
        ({"reduction_length": 8}, "set both, or neither"),
        ({"lr_schedule": "cosine"}, "needs lr_decay_steps"),
        ({"lr_end": 0.1}, "of lr_schedule linear and cosine"),
        ({"old_logprobs": "rollout", "correction": {"tokens": "mask"}}, "count it twice"),
        ({"minibatches": 2, "replay": "recorded"}, "use replay rollout or off"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        UpdateConfig(**settings)
