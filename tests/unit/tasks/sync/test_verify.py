"""What a sync's probe proves, and what of it counts as the engines' time."""

import math

import pytest

from tasks.sync.config import SyncConfig
from tasks.sync.verify import Scores, SyncMismatch, busy_seconds, compare, compare_fresh, probe_sequences


def test_engines_that_score_at_once_are_busy_once():
    assert busy_seconds([(10.0, 12.0), (11.0, 14.0)]) == pytest.approx(4.0)
    assert busy_seconds([(10.0, 14.0), (11.0, 12.0)]) == pytest.approx(4.0)
    assert busy_seconds([(13.0, 14.0), (10.0, 12.0)]) == pytest.approx(3.0)


def scores(logprobs: list[float], arithmetic: str = "float32", repeatable: bool = True) -> Scores:
    return Scores(logprobs=[logprobs], arithmetic=arithmetic, repeatable=repeatable)


def test_a_difference_beyond_what_fp32_allows_is_a_mismatch():
    assert compare(scores([-1, -2]), scores([-1, -2.01]), SyncConfig()).max_diff == pytest.approx(0.01)
    with pytest.raises(
        SyncMismatch, match=r"differ by 0\.03 nats \(at most 0\.02 is allowed\): the engine does not hold"
    ):
        compare(scores([-1, -2]), scores([-1, -2.03]), SyncConfig())


@pytest.mark.parametrize(
    ("trainer", "engine", "mean"),
    [
        ("bfloat16", "bfloat16", 0.3),
        ("float32", "bfloat16", 0.3),
        ("float16", "float32", 0.3),
        ("mxfp8", "mxfp8", 0.7),
        ("bfloat16", "mxfp8", 1.0),
        ("float32", "mxfp8", 1.0),
    ],
)
def test_what_rounds_is_judged_in_the_mean(trainer: str, engine: str, mean: float):
    """The very first sync of any run on a GPU: bf16 implementations differ by tenths of a nat where a model is unsure."""
    near, far = scores([-1, -2 - 1.9 * mean], engine), scores([-1, -2 - 2.1 * mean], engine)
    assert compare(scores([-1, -2], trainer), near, SyncConfig()).mean_diff == pytest.approx(0.95 * mean)
    with pytest.raises(SyncMismatch, match=rf"in {engine}, and of the trainer, in {trainer}, .* nats in the mean"):
        compare(scores([-1, -2], trainer), far, SyncConfig())


def test_settings_replace_what_the_arithmetic_allows():
    half = scores([-1, -2], "bfloat16"), scores([-1, -2.2], "bfloat16")
    for setting in ({"probe_tolerance": 0.1}, {"probe_mean_tolerance": 0.05}):
        with pytest.raises(SyncMismatch, match="sync.probe_tolerance and sync.probe_mean_tolerance"):
            compare(*half, SyncConfig(**setting))
    compare(scores([-1, -2]), scores([-1, -2.2]), SyncConfig(probe_tolerance=0.3))


def test_a_fresh_engine_must_give_the_same_bits_where_the_device_computes_the_same_twice():
    assert compare_fresh(scores([-1, -2]), scores([-1, -2]), SyncConfig()).max_diff == 0
    with pytest.raises(SyncMismatch, match="an update did not reach every weight"):
        compare_fresh(scores([-1, -2]), scores([-1, -2.0001]), SyncConfig())
    on_gpu = scores([-1, -2], repeatable=False)
    compare_fresh(on_gpu, scores([-1, -2.0001], repeatable=False), SyncConfig())
    with pytest.raises(SyncMismatch, match="an update did not reach every weight"):
        compare_fresh(on_gpu, scores([-1, -2.1], repeatable=False), SyncConfig())


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16", "mxfp8"])
def test_nan_is_a_mismatch(arithmetic: str):
    with pytest.raises(SyncMismatch):
        compare(scores([-1, math.nan], arithmetic), scores([-1, -2], arithmetic), SyncConfig())
    with pytest.raises(SyncMismatch):
        compare_fresh(scores([-1, math.nan], arithmetic), scores([-1, -2], arithmetic), SyncConfig())


def test_the_probe_is_the_same_in_every_process_and_within_the_vocabulary():
    config = SyncConfig(probe_sequences=3, probe_length=5)
    probe = probe_sequences(config, 7)
    assert probe == probe_sequences(config, 7)
    assert [len(tokens) for tokens in probe] == [5, 5, 5]
    assert all(0 <= token < 7 for tokens in probe for token in tokens)
