"""Routes that could not be replayed are refused by sample; each process gets those of its own layers; rows are laid out
beside their tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from infra.errors import BadInput
from infra.storage.schemas import Routes, pack_routes
from tasks.update import routes
from tasks.update.batch import read_samples
from tasks.update.packing import EMPTY, pack
from tasks.update.routes import NONE, RoutedModel

MODEL = RoutedModel(layers=(1, 2, 5), topk=2, experts=8)
PROMPT, RESPONSE = [4, 5, 6], [7, 8]


def experts(seed: int, layers: int = 3, tokens: int = 5) -> np.ndarray:
    """uint8 [tokens, layers, 2], distinct in each token."""
    rng = np.random.default_rng(seed)
    return (
        np.stack([rng.permutation(8)[:2] for _ in range(tokens * layers)]).reshape(tokens, layers, 2).astype(np.uint8)
    )


def row(seed: int = 0, **changes: Any) -> dict[str, Any]:
    mask = np.array([True] * 4 + [False])
    return {
        "prompt_id": f"p{seed}",
        "sample": seed,
        "prompt_ids": PROMPT,
        "response_ids": RESPONSE,
        "logprobs": [-1.0, -1.0],
        "loss_mask": [True, True],
        "advantage": 1.0,
        **pack_routes(Routes(experts(seed), mask, MODEL.layers)),
        **changes,
    }


def batch(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows))


def other(change: Callable[[np.ndarray], Any], layers: tuple[int, ...] = MODEL.layers) -> dict[str, Any]:
    """Routes after `change` of them (in place, or what it returns)."""
    values = experts(1)
    changed = change(values)
    values = values if changed is None else changed
    return pack_routes(Routes(values, np.arange(len(values)) < len(values) - 1, layers))


def zero(values: np.ndarray) -> None:
    values[:] = 0


def twice(values: np.ndarray) -> None:
    values[2, 1] = 3


def out_of_range(values: np.ndarray) -> None:
    values[0, 0, 0] = 8


NO_ROUTES = dict.fromkeys(("routes", "routes_dtype", "routes_shape", "routes_mask", "routes_layers"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other(zero), "all of its routes are zero"),
        (other(twice), r"token 2 in layer 2 name an expert twice: \[3, 3\]"),
        (other(out_of_range), "expert 8 .* the model has 8"),
        (other(lambda v: v[:, :2], (1, 2)), r"routes of 2 layers 1, 2, but the model has experts in 3: 1, 2, 5"),
        (other(lambda v: v, (1, 2, 4)), r"1, 2, 4, but the model has experts in 3: 1, 2, 5"),
        (other(lambda v: v[..., :1].copy()), "routes of 1 experts a token, but the model routes to 2"),
        (other(lambda v: v[:4]), "routes of 4 tokens, but prompt and response have 5"),
        (NO_ROUTES, "it has no routes"),
        (pack_routes(Routes(experts(1), np.zeros(5, bool), MODEL.layers)), "none of its tokens has a route"),
    ],
    ids=["zero", "duplicate", "out of range", "layer count", "other layers", "topk", "length", "absent", "unrouted"],
)
def test_routes_that_do_not_fit_are_refused_by_sample(change: dict[str, Any], said: str):
    with pytest.raises(BadInput, match=rf"row 1 \(prompt p1, sample 1\): .*{said}"):
        routes.check(batch(row(0), row(1, **change), row(2)), MODEL)


def test_a_masked_sample_may_come_without_sound_routes():
    routes.check(batch(row(0), row(1, **NO_ROUTES, loss_mask=[False, False])), MODEL)


def test_what_lies_in_unmarked_rows_is_never_looked_at():
    values = experts(1)
    values[1] = values[4] = 99
    packed = pack_routes(Routes(values, np.array([True, False, True, True, False]), MODEL.layers))
    routes.check(batch(row(1, **packed)), MODEL)
    (sample,) = read_samples(batch(row(1, **packed)), MODEL.layers)
    assert sample.routes is not None and (sample.routes[1] == NONE).all()
    np.testing.assert_array_equal(sample.routes[[0, 2, 3]], values[[0, 2, 3]])


def test_each_process_is_sent_its_own_layers_only():
    whole = batch(row(0), row(1))
    first, last, none = routes.parts(whole, MODEL, [(1,), (2, 5), ()])
    for part, layers in ((first, (1,)), (last, (2, 5))):
        for index, sample in enumerate(read_samples(part, layers)):
            assert sample.routes is not None
            at = [MODEL.layers.index(layer) for layer in layers]
            np.testing.assert_array_equal(sample.routes, experts(index)[:4, at])
        assert {tuple(found) for found in part["routes_layers"].to_pylist()} == {layers}
    assert [sum(map(len, part["routes"].to_pylist())) for part in (first, last, none)] == [20, 40, 0]
    assert all(sample.routes is None for sample in read_samples(none))


def test_all_processes_lay_a_batch_out_alike_whatever_layers_they_have():
    """Two samples of one prompt that was routed otherwise in layer 5 alone: it is not shared, on any process."""
    values = experts(0)
    values[0, 2] = (values[0, 2] + 1) % 8
    packed = pack_routes(Routes(values, np.arange(5) < 4, MODEL.layers))
    for part, layers in zip(
        routes.parts(batch(row(0), row(0, **packed), row(0)), MODEL, [(1,), (5,)]), [(1,), (5,)], strict=True
    ):
        (microbatch,) = pack(read_samples(part, layers), budget=100)
        assert [s.row for s in microbatch.samples] == [0, 2, 1]
        assert len(microbatch.tokens_S) == (3 + 1 + 1) + (3 + 1)


@pytest.mark.parametrize("share", [True, False])
def test_routes_lie_beside_their_tokens_and_padding_has_none(share: bool):
    rows = [
        row(0),
        row(1, prompt_ids=[9, 9], response_ids=[1, 2, 3], logprobs=[-1.0] * 3, loss_mask=[True, True, False]),
    ]
    rows.append(row(2))
    (part,) = routes.parts(batch(*rows), MODEL, [MODEL.layers])
    (microbatch,) = pack(read_samples(part, MODEL.layers), budget=100, share_prompts=share)
    assert microbatch.routes_SLK is not None
    for sample in microbatch.samples:  # token by token: the row's routes are the sample's where its tokens lie
        tokens = np.concatenate([sample.prompt, sample.response[:-1]])
        found = [
            (microbatch.tokens_S[at : at + 1].tolist(), microbatch.routes_SLK[at].numpy())
            for at in _places(microbatch, sample)
        ]
        assert [token for (token,), _ in found] == tokens.tolist()
        np.testing.assert_array_equal(np.stack([r for _, r in found]), sample.routes)
    padded = microbatch.padded(len(microbatch.tokens_S) + 3)
    assert padded.routes_SLK is not None and (padded.routes_SLK[-3:] == NONE).all()
    assert torch.equal(padded.loss_index_N, microbatch.loss_index_N)
    assert EMPTY.padded(4).segments[0].stop == 4


def _places(microbatch: Any, sample: Any) -> list[int]:
    """Where the sample's input tokens lie in the row: those that its last target sees."""
    at = sum(s.loss_tokens for s in microbatch.samples[: microbatch.samples.index(sample)]) + sample.loss_tokens - 1
    last = int(microbatch.loss_index_N[at])
    (segment,) = [s for s in microbatch.segments if s.start <= last < s.stop]
    return [*range(segment.prefix_start, segment.prefix_stop), *range(segment.start, last + 1)]
