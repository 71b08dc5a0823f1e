"""Which prompts a step trains on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.dataset.batches import step_rows, steps_per_epoch

sizes = st.tuples(st.integers(1, 80), st.integers(1, 20))
seeds = st.integers(0, 2**63)


def epoch_rows(n: int, per_step: int, seed: int, epoch: int) -> list[list[int]]:
    steps = steps_per_epoch(n, per_step)
    return [step_rows(n, per_step, seed, epoch * steps + i) for i in range(steps)]


@settings(max_examples=40)
@given(size=sizes, seed=seeds, epoch=st.integers(0, 1000))
def test_an_epoch_has_every_prompt_exactly_once(size: tuple[int, int], seed: int, epoch: int):
    rows = [row for step in epoch_rows(*size, seed, epoch) for row in step]
    assert sorted(rows) == list(range(size[0]))


@settings(max_examples=40)
@given(size=sizes, seed=seeds, epoch=st.integers(0, 1000))
def test_steps_of_an_epoch_are_of_nearly_equal_size_and_never_too_large(size: tuple[int, int], seed: int, epoch: int):
    lengths = [len(step) for step in epoch_rows(*size, seed, epoch)]
    assert max(lengths) <= size[1]
    assert max(lengths) - min(lengths) <= 1


@settings(max_examples=40)
@given(size=sizes, seed=seeds, start=st.integers(0, 50))
def test_a_run_resumed_anywhere_sees_what_the_undisturbed_run_saw(size: tuple[int, int], seed: int, start: int):
    undisturbed = [step_rows(*size, seed, step) for step in range(start + 5)]
    assert [step_rows(*size, seed, step) for step in range(start, start + 5)] == undisturbed[start:]


def test_resuming_at_the_last_batch_of_an_epoch_starts_the_next_epoch_whole():
    last, following = 7, range(8, 16)
    assert len(step_rows(61, 8, 0, last)) > 0
    assert sorted(row for step in following for row in step_rows(61, 8, 0, step)) == list(range(61))


def test_a_lone_last_prompt_is_shared_out_instead_of_getting_a_step_of_its_own():
    assert [len(step_rows(65, 64, 0, step)) for step in range(2)] == [33, 32]


def test_epochs_and_seeds_are_shuffled_differently():
    epochs = {tuple(step_rows(64, 64, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(epochs) == 9


def test_the_order_is_the_same_on_every_machine_and_version():
    assert step_rows(64, 8, 0, 0) == [34, 19, 61, 60, 44, 28, 2, 17]


@pytest.mark.parametrize(("n", "per_step", "step"), [(0, 8, 0), (8, 0, 0), (8, 8, -1)])
def test_impossible_arguments_are_refused(n: int, per_step: int, step: int):
    with pytest.raises(ValueError, match="must"):
        step_rows(n, per_step, 0, step)
