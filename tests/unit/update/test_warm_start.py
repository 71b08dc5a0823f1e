"""What a warm start trains on: every solution once before any again, in an order that its seed alone decides."""

from tasks.update.config import WarmStartConfig
from tasks.update.warm_start import batches

PAIRS = [([n], [n, 0]) for n in range(10)]


def test_every_pair_comes_once_before_any_comes_again():
    drawn = list(batches(PAIRS, WarmStartConfig(steps=6, samples_per_step=4), seed=0))
    assert [len(batch) for batch in drawn] == [4] * 6
    flat = [pair[0][0] for batch in drawn for pair in batch]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10)) and flat[:10] != flat[10:20]


def test_batches_larger_than_the_data_repeat_it():
    (batch,) = batches(PAIRS, WarmStartConfig(steps=1, samples_per_step=25), seed=0)
    assert len(batch) == 25


def test_the_order_is_the_seeds():
    first, again, other = (list(batches(PAIRS, WarmStartConfig(steps=3), seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
