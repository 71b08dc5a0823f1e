"""What a sync's probe proves, and what of it counts as the engines' time."""

import math

import pytest

from tasks.sync.config import SyncConfig
from tasks.sync.verify import SyncMismatch, busy_seconds, compare, probe_sequences


def test_engines_that_score_at_once_are_busy_once():
    assert busy_seconds([(10.0, 12.0), (11.0, 14.0)]) == pytest.approx(4.0)
    assert busy_seconds([(10.0, 14.0), (11.0, 12.0)]) == pytest.approx(4.0)
    assert busy_seconds([(13.0, 14.0), (10.0, 12.0)]) == pytest.approx(3.0)


def test_a_difference_beyond_the_tolerance_is_a_mismatch():
    assert compare([[-1.0, -2.0]], [[-1.0, -2.01]], 0.02).max_diff == pytest.approx(0.01)
    with pytest.raises(SyncMismatch, match="does not hold the published policy"):
        compare([[-1.0, -2.0]], [[-1.0, -2.03]], 0.02)
    assert compare([[-1.0, -2.0]], [[-1.0, -3.0]], 10, mean_tolerance=0.5).mean_diff == pytest.approx(0.5)
    with pytest.raises(SyncMismatch, match=r"0\.6 nats in the mean \(sync\.probe_mean_tolerance is 0\.5\)"):
        compare([[-1.0, -2.0]], [[-1.0, -3.2]], 10, mean_tolerance=0.5)


def test_nan_is_a_mismatch():
    with pytest.raises(SyncMismatch):
        compare([[-1.0, math.nan]], [[-1.0, -2.0]], 0.02)


def test_the_probe_is_the_same_in_every_process_and_within_the_vocabulary():
    config = SyncConfig(probe_sequences=3, probe_length=5)
    probe = probe_sequences(config, 7)
    assert probe == probe_sequences(config, 7)
    assert [len(tokens) for tokens in probe] == [5, 5, 5]
    assert all(0 <= token < 7 for tokens in probe for token in tokens)
