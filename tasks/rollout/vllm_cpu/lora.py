"""LoRA in vLLM's CPU backend, for engines in which one adapter serves every request (max_loras = 1).

Patches vLLM 0.30.0, BaseLinearLayerWithLoRA and PunicaWrapperCPU.
Fault: half of the decoding speed is lost (`make bench BENCH=lora_decode`, the stock engine beside ours).
Can go: when vLLM's CPU path knows that one adapter serves the batch.

vLLM's own CPU path finds each token's adapter anew in every layer and gathers its matrices: half of the decoding speed
is lost, and experts cannot have an adapter at all. Here one adapter is known when it is loaded:

- In fp32, W + B A is computed then, once, and packed for oneDNN, which multiplies a batch of decode's size in two thirds of
  the time that W itself takes. The packed copy is as large as the layer and is made anew with each adapter, so it is never
  stale; W stays for batches of which a part uses the adapter.
- Else (bf16, where the sum would be rounded; MXFP8, which does not quantise adapters; experts) y = W x + B (A x), two
  small products: the A of q, k, v (or gate, up) are stacked into one, and the scale is folded into B.

Shape suffixes: T tokens, P (token, expert) pairs, I input, O output, R ranks of all slices, E experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

SHAPES = 128
"""Numbers of tokens for which oneDNN keeps a layer's kernel."""
WIDE = 32
"""From this rank on, slices are expanded one by one: the zeros of a block-diagonal B would cost more than calls do."""


class StackedAdapter:
    """The adapter of one linear layer whose output has one or several slices (q, k, v).

    Slices that have the same A (as those that Megatron trains have: one A for its fused q, k, v) share its product.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor] | None], sizes: tuple[int, ...]):
        """`pairs`: (A [r, I], B [size, r] with the scale folded in) of each slice; None: the slice has no adapter."""
        unique: list[Tensor] = []
        rows: list[slice] = []  # of a_RI, for each slice of the output
        blocks: list[tuple[slice, slice, Tensor]] = []
        """(rows of a_RI, columns of y, B transposed) for each product."""
        start = 0
        for pair, size in zip(pairs, sizes, strict=True):
            columns, start = slice(start, start + size), start + size
            if pair is None:
                continue
            a, b = pair
            index = next((i for i, known in enumerate(unique) if torch.equal(known, a)), len(unique))
            if index == len(unique):
                unique.append(a)
                first = rows[-1].stop if rows else 0
                rows.append(slice(first, first + len(a)))
            last = blocks[-1] if blocks else None
            if last is not None and last[0] == rows[index] and last[1].stop == columns.start:
                blocks[-1] = (last[0], slice(last[1].start, columns.stop), torch.cat([last[2], b.t()], dim=1))
            else:
                blocks.append((rows[index], columns, b.t()))
        self.a_RI = torch.cat(unique)
        self.blocks = [(*at, b_RO.contiguous()) for *at, b_RO in blocks]
        if len(blocks) > 1 and max(len(a) for a in unique) < WIDE:
            diagonal_RO = self.a_RI.new_zeros(len(self.a_RI), start)
            for at, columns, b_RO in blocks:
                diagonal_RO[at, columns] = b_RO
            self.blocks = [(slice(None), slice(None), diagonal_RO)]

    def add_to(self, y_TO: Tensor, x_TI: Tensor, active_T1: Tensor | None = None) -> None:
        """y += B (A x), in place; `active_T1`: 1 for tokens that use the adapter, 0 for others (None: all do)."""
        low_TR = linear(x_TI, self.a_RI)
        if active_T1 is not None:
            low_TR *= active_T1
        for rows, columns, b_RO in self.blocks:
            y_TO[:, columns].addmm_(low_TR[:, rows], b_RO)

    def add_to_weight(self, whole_OI: Tensor) -> None:
        """W += B A, in place."""
        for rows, columns, b_RO in self.blocks:
            whole_OI[columns].addmm_(b_RO.t(), self.a_RI[rows])


def install() -> None:
    """Put this module's functions in the place of vLLM's. Engines with max_loras > 1 keep vLLM's own path."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    if BaseLinearLayerWithLoRA._apply_lora_to_output is _apply_lora_to_output:
        return
    _Stock.apply = BaseLinearLayerWithLoRA._apply_lora_to_output
    _Stock.apply_layer = BaseLinearLayerWithLoRA._apply_sync
    _Stock.update_metadata = PunicaWrapperCPU.update_metadata
    BaseLinearLayerWithLoRA._apply_lora_to_output = _apply_lora_to_output
    BaseLinearLayerWithLoRA._apply_sync = _apply_layer
    PunicaWrapperCPU.update_metadata = _update_metadata  # ty: ignore[invalid-assignment]
    for layer in (BaseLinearLayerWithLoRA, MergedColumnParallelLinearWithLoRA):
        layer.set_lora = _stacking(layer.set_lora)
        layer.reset_lora = _unstacking(layer.reset_lora)


class _Stock:
    """vLLM's own functions."""

    apply: Any
    apply_layer: Any
    update_metadata: Any


def _apply_layer(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stands in for BaseLinearLayerWithLoRA's; the layer with its adapter."""
    from vllm import _custom_ops as ops

    packed: Any = getattr(self, "_packed", None)
    if packed is None or active(self.punica_wrapper) is not True:
        return _Stock.apply_layer(self, x, bias)
    return ops.onednn_mm(packed, x, bias)


def _apply_lora_to_output(self: Any, x: Tensor, output: Tensor) -> Tensor:
    """Stands in for BaseLinearLayerWithLoRA's; adds the adapter's part to `output` in place."""
    if self.lora_a_stacked[0].shape[0] != 1:
        return _Stock.apply(self, x, output)
    adapter: StackedAdapter | None = getattr(self, "_stacked", None)
    uses = active(self.punica_wrapper)
    if adapter is None or uses is False:
        return output
    flat = output.view(-1, output.shape[-1])
    adapter.add_to(flat, x.view(-1, x.shape[-1]), None if uses is True else uses)
    return output


def active(punica: Any) -> bool | Tensor:
    """Which tokens of the batch use the adapter: True (all), False (none), or 1 and 0, float [T, 1]."""
    return getattr(punica, "_active", True)


def _update_metadata(self: Any, mapping: Any, lora_index_to_id: list, max_loras: int, vocab_size: int) -> None:
    """Stands in for PunicaWrapperCPU's; notes once for the whole batch which tokens use the adapter."""
    _Stock.update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size)
    used = self.token_lora_indices >= 0
    self._active = True if used.all() else bool(used.any()) and used.float().unsqueeze(1)


def _stacking(set_lora: Any) -> Any:
    """set_lora that also keeps the adapter in the layout that this module multiplies with, at its own rank."""

    from vllm import _custom_ops as ops

    def set_and_stack(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        set_lora(self, index, lora_a, lora_b)
        if self.lora_a_stacked[0].shape[0] != 1:
            return
        sliced = [lora_a] if isinstance(lora_a, Tensor) else list(lora_a)
        ranks = [0 if a is None else a.shape[0] for a in sliced]
        if len(ranks) != self.n_slices:  # one adapter over several slices: vLLM has spread it out
            ranks = [max(ranks)] * self.n_slices
        pairs = [
            (a[0, 0, :rank].clone(), b[0, 0, :, :rank]) if rank else None
            for a, b, rank in zip(self.lora_a_stacked, self.lora_b_stacked, ranks, strict=True)
        ]
        self._stacked = StackedAdapter(pairs, tuple(self.output_slices)) if any(ranks) else None
        weight = self.base_layer.weight.data
        exact = weight.dtype == torch.float32 and getattr(self.base_layer, "cpu_linear", None) is linear
        if self._stacked is not None and exact:
            whole = weight.clone()
            self._stacked.add_to_weight(whole)
            self._packed = ops.create_onednn_mm(whole.t(), SHAPES)

    return set_and_stack


def _unstacking(reset_lora: Any) -> Any:
    def reset_and_unstack(self: Any, index: int) -> None:
        reset_lora(self, index)
        self._stacked = self._packed = None

    return reset_and_unstack
