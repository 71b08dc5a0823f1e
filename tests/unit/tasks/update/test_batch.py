"""A scored batch is checked before it can poison an update."""

import math

import pyarrow as pa
import pytest

from infra.errors import BadInput
from tasks.update.batch import read_samples


def table(**changes) -> pa.Table:
    row = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "logprobs": [-1.0, -2.0, -3.0],
        "loss_mask": [True, True, False],
        "advantage": 0.5,
    }
    return pa.Table.from_pylist([row | changes])


def test_a_response_ends_with_its_last_token_that_counts():
    (sample,) = read_samples(table())
    assert sample.response.tolist() == [3, 4]
    assert sample.loss_tokens == 2


def test_what_is_masked_is_never_looked_at():
    (sample,) = read_samples(table(logprobs=[math.nan, -2.0, math.inf], loss_mask=[False, True, False]))
    assert sample.logprobs.tolist() == [0.0, -2.0]


def test_a_sample_masked_as_a_whole_may_hold_anything():
    (sample,) = read_samples(table(logprobs=[math.nan] * 3, loss_mask=[False] * 3, advantage=math.nan))
    assert (sample.loss_tokens, len(sample.advantages), len(sample.response)) == (0, 0, 0)


def test_every_token_has_the_samples_advantage_or_its_own():
    (sample,) = read_samples(table())
    assert sample.advantages.tolist() == [0.5, 0.5]
    (sample,) = read_samples(table(advantages=[1.0, -2.0, math.nan]))
    assert sample.advantages.tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "row 0: the prompt has no tokens"),
        ({"logprobs": [-1.0]}, "3 response tokens, 1 logprobs"),
        ({"logprobs": [-1.0, math.nan, -3.0]}, "row 0: a token that counts"),
        ({"advantage": math.inf}, "row 0: a token that counts"),
        ({"advantages": [1.0, None, 1.0]}, "row 0: a token that counts"),
        ({"advantages": [1.0]}, "and 1 advantages should be equally many"),
    ],
)
def test_what_would_poison_the_update_is_refused_by_row(changes, message):
    with pytest.raises(BadInput, match=message):
        read_samples(table(**changes))
