"""Returns of turns."""

import numpy as np

from tasks.reward.episodes import turn_returns


def test_a_turns_return_is_its_reward_and_what_follows_discounted():
    (got,) = turn_returns([[1.0, None, 4.0]], np.array([5.0]), 0.5)
    assert got.tolist() == [2.0, 2.0, 4.0]


def test_a_reward_that_no_turn_gave_is_the_last_turns():
    first, cut, none = turn_returns([[None, None], [None], []], np.array([0.5, 1.0, 0.0]), 1.0)
    assert (first.tolist(), cut.tolist(), none.tolist()) == ([0.5, 0.5], [1.0], [])
