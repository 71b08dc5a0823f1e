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
        pa.field("tools", pa.string()),
    ]
)
"""A prompt. messages: JSON list of {role, content, ...}, "" when `text` is used. answer, metadata: JSON. tools: JSON list
of the functions that the chat template is to offer; null for a prompt without."""

DEMONSTRATION = pa.schema(
    [
        _required("prompt_id", pa.string()),
        _required("messages", pa.string()),
        _required("text", pa.string()),
        _required("solution", pa.string()),
        pa.field("tools", pa.string()),
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

_EPISODE = [
    _required("episode", pa.string()),
    _required("row", pa.int32()),
    _required("sampled", pa.list_(pa.bool_())),
    _required("turn_ends", _IDS),
    _required("turn_rewards", pa.list_(pa.float32())),
    _required("conversation", pa.string()),
    _required("ended", pa.string()),
    _required("fault_detail", pa.string()),
]

EPISODES = pa.schema([*ROLLOUT, *_EPISODE])
"""Rollouts of an interactive environment: a row is an episode, or a part of one whose chat template rewrites earlier turns.

prompt_ids: what precedes the row's first sampled token. response_ids: the rest, observations too, up to the last sampled
token; sampled: which of them the policy sampled. The others' logprobs are null and no loss is on them. response_text: the
episode's last reply. row: 0, 1, ... of the episode. turn_ends: one past each turn's last sampled token, among response_ids.
turn_rewards: of all of the episode's turns, null where there is none. conversation: JSON messages, the prompt's too. ended:
done, length (a reply that was cut), turns or tokens (limits), or the cause for which it is masked, which fault_detail explains."""

SCORED = pa.schema(
    [
        *ROLLOUT,
        _required("environment", pa.string()),
        _required("answer", pa.string()),
        _required("reward", pa.float32()),
        _required("reward_parts", pa.string()),
        _required("advantage", pa.float32()),
        _required("loss_mask", pa.list_(pa.bool_())),
        pa.field("advantages", pa.list_(pa.float32())),
    ]
)
"""A rollout with its reward. reward_parts: JSON name -> float. loss_mask: the response tokens that count. advantages: one a
response token where they differ; null: each has `advantage`, which otherwise is their mean over the tokens that count."""

SCORED_EPISODES = pa.schema([*SCORED, *_EPISODE])
"""A row of EPISODES with its episode's reward."""

_ONE_A_RESPONSE_TOKEN = ("logprobs", "loss_mask", "sampled", "advantages")
_LEFT_OUT_WHERE_NULL = ("tools", "advantages")
"""Columns that a table may lack: `compact` writes none that holds nothing, and tables of before have none."""
ROUTES = ("routes", "routes_dtype", "routes_shape", "routes_mask", "routes_layers")


def validate(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with its columns in the schema's order; BadInput naming the column that does not fit.

    Checks names, types, nulls, and that logprobs and loss_mask have one entry a response token. `tools` and `advantages` may
    be missing: they are null then.
    """
    for name in set(_LEFT_OUT_WHERE_NULL) & set(schema.names) - set(table.column_names):
        table = table.append_column(schema.field(name), pa.nulls(table.num_rows, schema.field(name).type))
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


def compact(table: pa.Table) -> pa.Table:
    """`table` as it is stored: without tools where no prompt has any, and the like (as `validate` takes it back)."""
    names = set(_LEFT_OUT_WHERE_NULL) & set(table.column_names)
    empty = [name for name in names if table[name].null_count == table.num_rows]
    return table.drop_columns(empty)


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
