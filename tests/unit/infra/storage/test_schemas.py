"""What stages rely on between them: a batch with a wrong column is refused by name, and routes survive the trip."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from infra.errors import BadInput
from infra.storage.artifacts import ArtifactWriter, Store, open_artifact
from infra.storage.schemas import PROMPT, ROLLOUT, ROUTES, SCORED, Routes, pack_routes, unpack_routes, validate

NO_ROUTES = dict.fromkeys(ROUTES)


def rollout(**changes: Any) -> dict[str, Any]:
    row = {
        "prompt_id": "p0",
        "sample": 0,
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "logprobs": [-0.5, -1.0, -0.1],
        **NO_ROUTES,
        "finish_reason": "stop",
        "policy_version": "blake3:00",
        "seed": 7,
        "response_text": "six",
    }
    return row | changes


def scored(**changes: Any) -> dict[str, Any]:
    row = rollout() | {
        "environment": "addition",
        "answer": "6",
        "reward": 1.0,
        "reward_parts": '{"exact": 1.0}',
        "advantage": 0.5,
        "loss_mask": [True, True, False],
    }
    return row | changes


def test_a_right_table_comes_back_in_the_schemas_order() -> None:
    table = pa.Table.from_pylist([scored()], schema=SCORED)
    shuffled = table.select(sorted(table.column_names))
    assert validate(shuffled, SCORED).equals(table)
    assert validate(SCORED.empty_table(), SCORED).num_rows == 0


def test_a_scored_row_is_a_rollout_and_more() -> None:
    assert SCORED.names[: len(ROLLOUT.names)] == ROLLOUT.names


@pytest.mark.parametrize("name", [name for name in SCORED.names if name != "advantages"])
def test_a_missing_column_is_named(name: str) -> None:
    table = pa.Table.from_pylist([scored()], schema=SCORED)
    with pytest.raises(BadInput, match=name):
        validate(table.drop_columns([name]), SCORED)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("reward", pa.array([1.0], pa.float64())),
        ("seed", pa.array([None], pa.int64())),
        ("prompt_ids", pa.array([[1]], pa.list_(pa.int64()))),
        ("logprobs", pa.array([[-0.5]], pa.list_(pa.float32()))),
        ("loss_mask", pa.array([[True] * 4], pa.list_(pa.bool_()))),
    ],
)
def test_a_wrong_column_is_named(column: str, values: pa.Array) -> None:
    table = pa.Table.from_pylist([scored()], schema=SCORED)
    wrong = table.set_column(SCORED.names.index(column), column, values)
    with pytest.raises(BadInput, match=column):
        validate(wrong, SCORED)


def test_an_unknown_or_repeated_column_is_refused() -> None:
    table = PROMPT.empty_table()
    with pytest.raises(BadInput, match="extra"):
        validate(table.append_column("extra", pa.array([], pa.string())), PROMPT)
    with pytest.raises(BadInput, match="once"):
        validate(table.append_column("text", pa.array([], pa.string())), PROMPT)


EXPERTS = st.sampled_from([np.uint8, np.uint16]).flatmap(
    lambda dtype: nps.arrays(dtype, nps.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=5))
)


@given(EXPERTS, st.data())
def test_routes_and_their_mask_survive_parquet_types(routes: np.ndarray, data: st.DataObject) -> None:
    mask = data.draw(nps.arrays(np.bool_, routes.shape[0]))
    layers = tuple(range(1, 1 + routes.shape[1]))
    table = pa.Table.from_pylist([rollout(**pack_routes(Routes(routes, mask, layers)))], schema=ROLLOUT)
    unpacked = unpack_routes(validate(table, ROLLOUT).to_pylist()[0])
    assert unpacked is not None
    assert unpacked.experts.dtype == routes.dtype
    np.testing.assert_array_equal(unpacked.experts, routes)
    np.testing.assert_array_equal(unpacked.mask, mask)
    assert unpacked.layers == layers


def test_strided_routes_are_packed_by_value() -> None:
    routes = np.arange(24).reshape(4, 3, 2).astype(np.uint16)[::-1, :, ::-1]
    unpacked = unpack_routes(pack_routes(Routes(routes, np.ones(4, bool), (0, 1, 5))))
    assert unpacked is not None
    np.testing.assert_array_equal(unpacked.experts, routes)


def test_a_dense_model_has_no_routes() -> None:
    assert unpack_routes(rollout()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"routes": b"123"},
        {"routes_mask": b"1"},
        {"routes_mask": None},
        {"routes_dtype": "int64"},
        {"routes_shape": [2, 3]},
        {"routes_layers": [0, 1, 2]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_damaged_routes_are_refused(change: dict[str, Any]) -> None:
    row = rollout(**pack_routes(Routes(np.zeros((5, 2, 1), np.uint8), np.ones(5, bool), (0, 1))))
    with pytest.raises(BadInput, match="routes"):
        unpack_routes(row | change)


@pytest.mark.parametrize(
    ("routes", "mask", "layers"),
    [
        (np.zeros((5, 2, 1), np.int64), np.ones(5, bool), (0, 1)),
        (np.zeros((5, 2), np.uint8), np.ones(5, bool), (0, 1)),
        (np.zeros((5, 2, 1), np.uint8), np.ones(4, bool), (0, 1)),
        (np.zeros((5, 2, 1), np.uint8), np.ones(5, np.uint8), (0, 1)),
        (np.zeros((5, 2, 1), np.uint8), np.ones(5, bool), (0,)),
        (np.zeros((5, 2, 1), np.uint8), np.ones(5, bool), (1, 1)),
    ],
)
def test_routes_of_another_form_are_refused(routes: np.ndarray, mask: np.ndarray, layers: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="routes"):
        pack_routes(Routes(routes, mask, layers))


def test_records_keep_their_schema_in_an_artifact(file_store: Store) -> None:
    table = pa.Table.from_pylist([scored(), scored(sample=1)], schema=SCORED)
    with ArtifactWriter(file_store, "scored", "scored") as w:
        w.table("scored", table)
    assert validate(open_artifact(w.ref).table("scored"), SCORED).equals(table)
