"""A policy that does not fit the model is refused, by the tensor's name, before anything changes."""

from collections.abc import Iterator

import pytest
import torch

from infra.errors import BadInput
from tasks.rollout.weights.loader import collect

EXPECTED = {"a": (2, 3), "b": (4,)}


def policy(**changes: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(({"a": torch.ones(2, 3), "b": torch.ones(4)} | changes).items())


def test_a_fitting_policy_is_taken_without_copies():
    tensors = policy(b=torch.ones(4, dtype=torch.bfloat16))
    collected = collect(tensors, EXPECTED)
    assert [name for name, _ in collected] == ["a", "b"]
    assert all(tensor is given for (_, tensor), (_, given) in zip(collected, tensors, strict=True))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (policy(c=torch.ones(1)), "'c': the model has none"),
        (policy()[:1], "'b': missing"),
        ([], "'a' and 1 more: missing"),
        (policy(a=torch.ones(3, 2)), r"'a': shape \[3, 2\], the model's is \[2, 3\]"),
        (policy() + policy()[:1], "'a': given twice"),
        (policy(b=torch.ones(4, dtype=torch.int32)), "'b': torch.int32, a floating point"),
    ],
    ids=["unknown", "missing", "empty", "misshapen", "twice", "integers"],
)
def test_a_policy_that_does_not_fit_names_the_tensor(tensors: list[tuple[str, torch.Tensor]], message: str):
    with pytest.raises(BadInput, match=message):
        collect(tensors, EXPECTED)


def test_a_source_that_breaks_off_raises_its_own_error():
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2, 3)
        raise ConnectionError("store went away")

    with pytest.raises(ConnectionError):
        collect(source(), EXPECTED)
