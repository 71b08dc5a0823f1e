"""Arrow schemas of the records that stages exchange, one row a record, and the packing of routed experts.

Token ids are those of the model's tokenizer. T = len(prompt_ids) + len(response_ids) throughout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow.compute import call_function as compute

from infra.errors import BadInput

if TYPE_CHECKING:
    import numpy as np


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_IDS = pa.list_(pa.int32())

PROMPT = pa.schema(
    [
        _required("prompt_id", pa.string()),
        _required("environment", pa.string()),
        _required("messages", pa.string()),
        _required("text", pa.string()),
        _required("answer", pa.string()),
        _required("metadata", pa.string()),
    ]
)
"""A prompt. messages: JSON list of {role, content}, "" when `text` is used. answer, metadata: JSON."""

DEMONSTRATION = pa.schema(
    [
        _required("prompt_id", pa.string()),
        _required("messages", pa.string()),
        _required("text", pa.string()),
        _required("solution", pa.string()),
    ]
)
"""A prompt (see PROMPT) with a response that earns its environment's full reward."""

ROLLOUT = pa.schema(
    [
        _required("prompt_id", pa.string()),
        _required("sample", pa.int32()),
        _required("prompt_ids", _IDS),
        _required("response_ids", _IDS),
        _required("logprobs", pa.list_(pa.float32())),
        pa.field("routes", pa.binary()),
        pa.field("routes_dtype", pa.string()),
        pa.field("routes_shape", pa.list_(pa.int32())),
        pa.field("routes_mask", pa.binary()),
        pa.field("routes_layers", pa.list_(pa.int32())),
        _required("finish_reason", pa.string()),
        _required("policy_version", pa.string()),
        _required("seed", pa.int64()),
        _required("response_text", pa.string()),
    ]
)
"""A sampled response. logprobs: nats, of the processed distribution (after temperature and the like), one a response
token. routes*: see `pack_routes`; null for dense models. policy_version: digest of the policy that sampled it."""

SCORED = pa.schema(
    [
        *ROLLOUT,
        _required("environment", pa.string()),
        _required("answer", pa.string()),
        _required("reward", pa.float32()),
        _required("reward_parts", pa.string()),
        _required("advantage", pa.float32()),
        _required("loss_mask", pa.list_(pa.bool_())),
    ]
)
"""A rollout with its reward. reward_parts: JSON name -> float. loss_mask: the response tokens that count."""

_ONE_A_RESPONSE_TOKEN = ("logprobs", "loss_mask")
ROUTES = ("routes", "routes_dtype", "routes_shape", "routes_mask", "routes_layers")


def validate(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with its columns in the schema's order; BadInput naming the column that does not fit.

    Checks names, types, nulls, and that logprobs and loss_mask have one entry a response token.
    """
    missing = [name for name in schema.names if name not in table.column_names]
    unknown = [name for name in table.column_names if name not in schema.names]
    if missing or unknown or len(table.column_names) != len(schema.names):
        raise BadInput(f"columns: missing {missing}, not in the schema {unknown}; expected each of {schema.names} once")
    for field in schema:
        column = table[field.name]
        if column.type != field.type:
            raise BadInput(f"column {field.name!r} is {column.type}, expected {field.type}")
        if column.null_count and not field.nullable:
            raise BadInput(f"column {field.name!r} has {column.null_count} nulls, expected none")
    for name in set(_ONE_A_RESPONSE_TOKEN) & set(schema.names):
        lengths = [compute("list_value_length", [table[column]]) for column in (name, "response_ids")]
        same = compute("equal", lengths)
        if (row := same.index(False).as_py()) >= 0:
            raise BadInput(f"column {name!r} in row {row}: expected one entry a response token")
    return table.select(schema.names).cast(schema)


@dataclass(frozen=True)
class Routes:
    """The experts that the tokens of one sequence were sent to."""

    experts: "np.ndarray"
    """uint8 or uint16 [T, layers, topk]: expert ids, in any order within a token."""
    mask: "np.ndarray"
    """bool [T], False where the token has no route (the last sampled token, or an EOS appended after the fact); such rows
    hold no meaning and must not be replayed."""
    layers: tuple[int, ...]
    """The number N of `model.layers.N` of each entry of the second dimension: layers with experts, ascending."""


def pack_routes(routes: Routes) -> dict[str, Any]:
    """The five `routes*` columns of a row."""
    import numpy as np

    experts, mask = routes.experts, routes.mask
    if experts.dtype not in (np.uint8, np.uint16) or experts.ndim != 3:
        raise BadInput(f"routes: {experts.dtype} {experts.shape}, expected uint8 or uint16 [T, layers, topk]")
    if mask.dtype != np.bool_ or mask.shape != experts.shape[:1]:
        raise BadInput(f"routes_mask: {mask.dtype} {mask.shape}, expected bool [{experts.shape[0]}]")
    _check_layers(routes.layers, experts.shape[1])
    return {
        "routes": np.ascontiguousarray(experts, dtype=experts.dtype.newbyteorder("<")).tobytes(),
        "routes_dtype": experts.dtype.name,
        "routes_shape": list(experts.shape),
        "routes_mask": mask.astype(np.uint8).tobytes(),
        "routes_layers": list(routes.layers),
    }


def unpack_routes(row: Mapping[str, Any]) -> Routes | None:
    """The routes given to `pack_routes`, as read-only views of the row; None when the row has none."""
    import numpy as np

    values = [row[name] for name in ROUTES]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise BadInput(f"{', '.join(ROUTES)}: expected all or none in a row")
    data, dtype, shape, packed_mask, layers = values
    if dtype not in ("uint8", "uint16") or len(shape) != 3 or min(shape) < 0:
        raise BadInput(f"routes: {dtype} {shape}, expected uint8 or uint16 [T, layers, topk]")
    item = np.dtype(dtype).newbyteorder("<")
    if len(data) != item.itemsize * shape[0] * shape[1] * shape[2] or len(packed_mask) != shape[0]:
        raise BadInput(f"routes: {len(data)} bytes and a mask of {len(packed_mask)} do not fit {dtype} {list(shape)}")
    _check_layers(layers, shape[1])
    experts = np.frombuffer(data, item).reshape(shape).astype(np.dtype(dtype), copy=False)
    return Routes(experts, np.frombuffer(packed_mask, np.uint8) != 0, tuple(layers))


def _check_layers(layers: Sequence[int], count: int) -> None:
    if len(layers) != count or list(layers) != sorted(set(layers)):
        raise BadInput(f"routes_layers: {list(layers)}, expected the ascending numbers of {count} layers")
