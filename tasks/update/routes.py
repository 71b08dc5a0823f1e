"""Routed experts of a batch: checked against the model, cut to a process's own layers, laid beside its tokens.

Shapes: T tokens of a sequence, L layers with experts, K experts a token.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from infra.errors import BadInput
from infra.storage.schemas import ROUTES, SCORED, Routes, pack_routes, unpack_routes

NONE = -1
"""Expert id where a token has no route: the trainer routes it itself."""
PROMPT_ROUTES = "prompt_routes"
"""Column of a process's batch: a digest of the prompt's routes in all layers."""


@dataclass(frozen=True)
class RoutedModel:
    """What routes must fit."""

    layers: tuple[int, ...]
    """The numbers N of all `model.layers.N` with experts, ascending."""
    topk: int
    """Experts a token."""
    experts: int
    """Experts of a layer."""


def has_routes(batch: pa.Table) -> bool:
    """Whether any row of a SCORED table brings routes."""
    return "routes" in batch.column_names and batch["routes"].null_count < len(batch)


def check(batch: pa.Table, model: RoutedModel) -> None:
    """Refuse a batch of which any sample that is trained on could not be replayed on `model`.

    BadInput names the row, its prompt and sample, and what is wrong: no routes, another length than its tokens, other
    layers, none of its tokens routed, ids out of range, an id twice in a token (zeros throughout are that).
    """
    for row, values in enumerate(_rows(batch)):
        if any(values["loss_mask"]) and (fault := _fault(values, model)):
            raise BadInput(
                f"scored batch, row {row} (prompt {values.get('prompt_id')}, sample {values.get('sample')}): {fault}"
            )


def _fault(values: dict[str, Any], model: RoutedModel) -> str | None:
    routes = unpack_routes(values)
    if routes is None:
        return "it has no routes, others of the batch have; record them (rollout.routes) or set update.replay to off"
    tokens, layers, topk = routes.experts.shape
    expected = len(values["prompt_ids"]) + len(values["response_ids"])
    if tokens != expected:
        return f"routes of {tokens} tokens, but prompt and response have {expected}"
    if routes.layers != model.layers:
        return f"routes of {layers} layers {_some(routes.layers)}, but the model has experts in {len(model.layers)}: {_some(model.layers)}"
    if topk != model.topk:
        return f"routes of {topk} experts a token, but the model routes to {model.topk}"
    if not routes.mask.any():
        return "none of its tokens has a route; the capture of routed experts is broken"
    recorded = routes.experts[routes.mask]
    if not recorded.any() and model.topk * len(model.layers) > 1:
        return "all of its routes are zero; the capture of routed experts is broken"
    if recorded.max() >= model.experts:
        return f"expert {recorded.max()} in its routes, but the model has {model.experts}"
    ordered = np.sort(recorded, axis=-1)
    if (twice := (ordered[..., 1:] == ordered[..., :-1]).any(-1)).any():
        at, layer = np.argwhere(twice)[0]
        return (
            f"the routes of token {np.flatnonzero(routes.mask)[at]} in layer {model.layers[layer]} name an expert twice: "
            f"{recorded[at, layer].tolist()}"
        )
    return None


def parts(batch: pa.Table, model: RoutedModel | None, layers: Sequence[Sequence[int]]) -> list[pa.Table]:
    """What each process of a trainer is sent: the batch with the routes of its own `layers` alone.

    Checks the batch first (see `check`). With `model` None nothing is replayed and routes stay behind. A column
    `prompt_routes` is added, so that all processes lay the batch out alike, whatever layers they have.
    """
    bare = batch.select([name for name in batch.column_names if name not in ROUTES])
    if model is None:
        return [bare] * len(layers)
    check(batch, model)
    rows = _rows(batch, [*ROUTES, "prompt_ids"])
    unpacked = [unpack_routes(row) for row in rows]
    digests = [
        r
        and hashlib.blake2b(
            r.experts[: len(row["prompt_ids"])].tobytes() + r.mask[: len(row["prompt_ids"])].tobytes(), digest_size=16
        ).digest()
        for r, row in zip(unpacked, rows, strict=True)
    ]
    bare = bare.append_column(PROMPT_ROUTES, pa.array(digests, pa.binary()))
    made: dict[tuple[int, ...], pa.Table] = {}
    for own in map(tuple, layers):
        if own not in made:
            made[own] = _with_routes(bare, [r and _of_layers(r, own) for r in unpacked])
    return [made[tuple(own)] for own in layers]


def _of_layers(routes: Routes, layers: Sequence[int]) -> Routes:
    if tuple(layers) == routes.layers:
        return routes
    at = [routes.layers.index(layer) for layer in layers]
    return Routes(routes.experts[:, at], routes.mask, tuple(layers))


def _with_routes(batch: pa.Table, routes: list[Routes | None]) -> pa.Table:
    packed = [pack_routes(r) if r else dict.fromkeys(ROUTES) for r in routes]
    for name in ROUTES:
        field = SCORED.field(name)
        batch = batch.append_column(field, pa.array([columns[name] for columns in packed], field.type))
    return batch


def replayed(values: dict[str, Any], layers: Sequence[int], tokens: int) -> np.ndarray | None:
    """int16 [tokens, L, K]: the experts of a row's first `tokens` tokens in `layers`, NONE where there is no route."""
    routes = unpack_routes(values)
    if routes is None or not layers:
        return None
    at = [routes.layers.index(layer) for layer in layers]
    experts = routes.experts[:tokens, at].astype(np.int16)
    experts[~routes.mask[:tokens]] = NONE
    return experts


def bytes_of(batch: pa.Table) -> int:
    """Bytes that the routes of a table take."""
    return sum(batch[name].nbytes for name in ROUTES if name in batch.column_names)


def _rows(batch: pa.Table, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    wanted = names or [*ROUTES, "prompt_id", "sample", "prompt_ids", "response_ids", "loss_mask"]
    return batch.select([name for name in wanted if name in batch.column_names]).to_pylist()


def _some(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
