"""The penalty of long responses: what each length costs, and who pays it."""

import numpy as np
import pytest

from infra.errors import BadInput
from tasks.reward.config import RewardConfig
from tasks.reward.overlong import PART, penalties, punished
from tasks.reward.verifiers import Verdict

DAPO = RewardConfig(overlong_length=100, overlong_buffer=20)


def test_it_grows_evenly_within_the_buffer_and_stays_whole_beyond():
    found = penalties(np.array([0, 80, 85, 90, 100, 130]), limit=100, buffer=20)
    np.testing.assert_allclose(found, [0, 0, -0.25, -0.5, -1, -1])


def test_it_is_a_part_of_its_own_beside_the_environments():
    config = RewardConfig(overlong_length=100, overlong_buffer=20, overlong_penalty=0.5)
    found = punished([Verdict({"right": 1.0, "short": 0.5})], np.array([90]), config)
    assert found == [Verdict({"right": 1.0, "short": 0.5, PART: -0.25})]


def test_a_masked_sample_stays_as_it_is():
    masked = Verdict(fault="timeout", detail="no reward within 1 s")
    assert punished([masked], np.array([100]), DAPO) == [masked]


def test_without_the_setting_nothing_changes():
    verdicts = [Verdict({"reward": 1.0})]
    assert punished(verdicts, np.array([10**6]), RewardConfig()) is verdicts


def test_a_part_of_that_name_is_not_overwritten():
    with pytest.raises(BadInput, match="has a part 'overlong_penalty' already"):
        punished([Verdict({PART: 1.0})], np.array([1]), DAPO)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"overlong_length": 100}, "set both, or neither"),
        ({"overlong_buffer": 10}, "set both, or neither"),
        ({"overlong_length": 10, "overlong_buffer": 20}, "overlong_buffer 20 is longer than overlong_length 10"),
        ({"overlong_length": 20, "overlong_buffer": 20, "credit": "turn"}, "needs credit episode"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        RewardConfig(**settings)
