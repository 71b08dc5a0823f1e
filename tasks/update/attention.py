"""Attention and rotary positions over a packed row, for Megatron's local (non-TE) layers.

`SegmentAttention` takes the place of Megatron's core attention. `attention_mask` carries the number of an
`AttentionLayout`: index tensors that gather queries and keys of all segments into a few padded batches, so that the
attention costs what its segments cost, not the square of the row. (A number, because Megatron's recomputation keeps
tensors only.)

Shape suffixes: S tokens, B segments of a bucket, Q and K their padded query and key lengths, G query groups, D head size.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention

from tasks.update.packing import Microbatch, Segment


@dataclass(frozen=True)
class Bucket:
    """Segments of like lengths, padded to the longest."""

    queries_BQ: Tensor
    """int64, rows of the S tokens (0 where padded)."""
    keys_BK: Tensor
    """int64, rows of the S tokens: the prefix, then the segment itself (0 where padded)."""
    mask_BQK: Tensor
    """bool, True where a query sees a key. A padded query sees one key, so that its softmax is finite."""
    distance_BQK: Tensor
    """int64, positions from key to query (0 at what is padded)."""
    _windows: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def mask(self, window: int | None) -> Tensor:
        """`mask_BQK` of a layer that looks back at most `window` positions (None: at all); made once for all its kind."""
        if window is None:
            return self.mask_BQK
        if window not in self._windows:
            self._windows[window] = self.mask_BQK & (self.distance_BQK <= window)
        return self._windows[window]


@dataclass(frozen=True)
class AttentionLayout:
    """How a row's attention is computed. `restore_S` finds each token's result among the buckets' queries."""

    buckets: tuple[Bucket, ...]
    restore_S: Tensor

    @classmethod
    def of(cls, segments: tuple[Segment, ...]) -> "AttentionLayout":
        """The layout of a row's segments, which cover it in order."""
        by_size: defaultdict[tuple[int, int], list[Segment]] = defaultdict(list)
        for segment in segments:  # powers of two bound the padding to less than half of each side
            own, prefix = segment.stop - segment.start, segment.prefix_stop - segment.prefix_start
            by_size[own.bit_length(), prefix.bit_length()].append(segment)
        buckets = tuple(_bucket(members) for members in by_size.values())
        order = np.concatenate([_token_slots(members) for members in by_size.values()])
        restore = np.full(segments[-1].stop, -1)
        restore[order[order >= 0]] = np.flatnonzero(order >= 0)
        return cls(buckets, torch.from_numpy(restore))


def _token_slots(segments: list[Segment]) -> np.ndarray:
    """The token in each query slot of a bucket, flattened [B * Q]; -1 where padded."""
    longest = max(segment.stop - segment.start for segment in segments)
    slots = np.full((len(segments), longest), -1)
    for b, segment in enumerate(segments):
        slots[b, : segment.stop - segment.start] = np.arange(segment.start, segment.stop)
    return slots.reshape(-1)


def _bucket(segments: list[Segment]) -> Bucket:
    queries = _token_slots(segments).reshape(len(segments), -1)
    width = max(s.prefix_stop - s.prefix_start + s.stop - s.start for s in segments)
    keys = np.full((len(segments), width), -1)
    mask = np.zeros((*queries.shape, width), dtype=bool)
    distance = np.zeros(mask.shape, dtype=np.int64)
    for b, segment in enumerate(segments):
        own, prefix = segment.stop - segment.start, segment.prefix_stop - segment.prefix_start
        keys[b, :prefix] = np.arange(segment.prefix_start, segment.prefix_stop)
        keys[b, prefix : prefix + own] = np.arange(segment.start, segment.stop)
        mask[b, :own, :prefix] = True
        mask[b, :own, prefix : prefix + own] = np.tri(own, dtype=bool)
        mask[b, own:, 0] = True
        seen = np.arange(prefix + own)  # a prefix is the whole of what comes before its segment
        distance[b, :own, : prefix + own] = seen[prefix:, None] - seen
    return Bucket(
        torch.from_numpy(queries.clip(0)),
        torch.from_numpy(keys.clip(0)),
        torch.from_numpy(mask),
        torch.from_numpy(distance),
    )


_layouts: dict[int, AttentionLayout] = {}
"""Of the microbatches of the schedule that is running, by their number."""


class SegmentAttention(MegatronModule):
    """Core attention (no parameters) of packed segments through torch's scaled_dot_product_attention.

    Layers with a sliding window (`window_size` of Megatron's config) see that far back in their own sequence. Query
    heads that share a key head are folded into the query length, so keys and values are never repeated.
    """

    def __init__(  # Megatron's builder protocol
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **unused: Any
    ):
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError("attention dropout makes the trainer's policy another one than the engine's; set it to 0")
        self.softmax_scale = softmax_scale
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] if slides else None

    def forward(
        self,
        query_S1HD: Tensor,
        key_S1GD: Tensor,
        value_S1GD: Tensor,
        attention_mask: Tensor,
        /,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """[S, 1, heads * value head size]."""
        layout = _layouts[int(attention_mask)]
        tokens, _, heads, _ = query_S1HD.shape
        groups, value_size = key_S1GD.shape[2], value_S1GD.shape[-1]
        query_SX = query_S1HD.reshape(tokens, -1)
        key_value_SX = torch.cat([key_S1GD, value_S1GD], dim=-1).reshape(tokens, -1)
        results = []
        for bucket in layout.buckets:
            batch, length = bucket.queries_BQ.shape
            # An embedding is a gather whose backward sums rows deterministically and without a loop over indices.
            query = embedding(bucket.queries_BQ, query_SX).view(batch, length, groups, heads // groups, -1)
            query_BGQD = query.permute(0, 2, 3, 1, 4).reshape(batch, groups, heads // groups * length, -1)
            key_value = embedding(bucket.keys_BK, key_value_SX).view(batch, bucket.keys_BK.shape[1], groups, -1)
            key_BGKD, value_BGKD = key_value.transpose(1, 2).split([key_S1GD.shape[-1], value_size], dim=-1)
            mask_B1QK = bucket.mask(self.window).repeat(1, heads // groups, 1).unsqueeze(1)
            result = scaled_dot_product_attention(
                query_BGQD, key_BGKD, value_BGKD, attn_mask=mask_B1QK, scale=self.softmax_scale
            )
            result = result.view(batch, groups, heads // groups, length, value_size).permute(0, 3, 1, 2, 4)
            results.append(result.reshape(batch * length, heads * value_size))
        return embedding(layout.restore_S, torch.cat(results)).unsqueeze(1)


class RotaryAtPositions(nn.Module):
    """A model's rotary embedding, read at each token's own position instead of at 0..S-1."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary
        self.positions_S: Tensor | None = None
        """Of the row about to be computed."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Rows of the table that the row needs."""
        assert self.positions_S is not None
        return int(self.positions_S.max()) + 1

    def forward(self, length: int, **kwargs: Any) -> Tensor | tuple[Tensor, float]:
        """[S, 1, 1, rotary size]; YaRN adds its scale."""
        table = self.rotary(length, **kwargs)
        if isinstance(table, tuple):
            return table[0][self.positions_S], table[1]
        return table[self.positions_S]


class SharedPrefixRow:
    """How a microbatch enters models with `SegmentAttention` layers: any device, prompts shared."""

    def __init__(self, models: list[Any]):
        self.models = models
        for model in models:
            model.rotary_pos_emb = RotaryAtPositions(model.rotary_pos_emb)

    def arguments(self, microbatch: Microbatch) -> dict[str, Any]:
        """Keyword arguments of GPTModel.forward that say who sees whom, and where."""
        for model in self.models:
            model.rotary_pos_emb.positions_S = microbatch.positions_S
        number = len(_layouts)
        _layouts[number] = AttentionLayout.of(microbatch.segments)
        return {"attention_mask": torch.tensor(number), "packed_seq_params": None}

    def clear(self) -> None:
        """At the end of a schedule."""
        _layouts.clear()


class ThdRow:
    """How a microbatch enters a model with Transformer Engine layers: packed `thd`, one segment a sample.

    TE's kernels take variable lengths but no shared prefixes, so this goes with `share_prompts=False`; Megatron reads
    the rotary positions off the cumulative lengths. Needs a GPU: it is not run in this repository's tests.
    """

    def __init__(self, models: list[Any]):
        self.models = models

    def arguments(self, microbatch: Microbatch) -> dict[str, Any]:
        """Keyword arguments of GPTModel.forward."""
        ends = [0, *(segment.stop for segment in microbatch.segments)]
        lengths = torch.tensor(ends, dtype=torch.int32, device=microbatch.tokens_S.device)
        longest = max(stop - start for start, stop in pairwise(ends))
        return {
            "attention_mask": None,
            "packed_seq_params": PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=lengths,
                cu_seqlens_kv=lengths,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
        }

    def clear(self) -> None:
        """Nothing is kept."""
