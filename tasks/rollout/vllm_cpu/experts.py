"""Experts in vLLM's CPU backend as plain products: with an adapter (vLLM has none for CPUs), or in MXFP8.

Patches vLLM 0.30.0, select_unquantized_moe_backend and FusedMoEWithLoRA.
Fault: with enable_lora any MoE model takes Triton's experts, and there is no Triton for CPUs; nor experts in MXFP8.
Seen: the engine does not load. Proof: tests/integration/test_lora_engine.py, test_mxfp8.py, against merged weights.
Can go: when vLLM has experts with adapters on CPUs.

Each expert's tokens go through two products of its own and the small ones of its adapter (see vllm_cpu/lora.py). The routing is
vLLM's, so routed experts are recorded as ever.

Shape suffixes: T tokens, K experts a token, P = T * K pairs sorted by expert, H hidden, I intermediate, E experts.
"""

import os
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
import vllm.model_executor.layers.fused_moe.oracle.unquantized as oracle
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as unquantized
from torch import Tensor
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

from infra.numerics.mxfp8 import rounded
from tasks.rollout.mxfp8 import PLAIN_EXPERTS_ENV
from tasks.rollout.vllm_cpu.lora import StackedAdapter, active


class PlainExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """Experts on the CPU, weights laid out as in the checkpoint, with or without an adapter."""

    isa = ""
    """No kernel has packed the weights (see slots)."""
    gate_up: list[StackedAdapter] | None = None
    """Of each expert; None: no adapter."""
    down: list[StackedAdapter] | None = None
    rounds: bool = False
    """Whether the products' inputs are rounded to MXFP8."""

    @classmethod
    def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing is packed: an update in place reaches the weights that are used."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """output [T, H] = sum over a token's experts of weight * W2 act(W1 x)."""
        ids_P = (topk_ids if expert_map is None else expert_map[topk_ids]).flatten().long()
        order_P = ids_P.argsort(stable=True)  # experts of other ranks (-1) come first
        token_P = order_P // topk_ids.shape[1]
        counts = torch.bincount(ids_P[order_P] + 1, minlength=len(w1) + 1).tolist()
        uses = active(self._lora_context.punica_wrapper) if self._lora_context is not None else False
        mask_P1 = uses[token_P] if isinstance(uses, Tensor) else None
        x_PH = hidden_states[token_P]
        gate_up_PO = self._grouped(x_PH, w1, counts, self.gate_up if uses is not False else None, mask_P1)
        act_PI = gate_up_PO.new_empty(len(gate_up_PO), w2.shape[2])
        self.activation(activation, act_PI, gate_up_PO)
        weights_P1 = topk_weights.flatten()[order_P].unsqueeze(1)
        if self.rounds:  # Megatron weighs before the second product, in fp32: what is rounded must be the same
            act_PI = (act_PI * weights_P1).to(act_PI.dtype)
        down_PH = self._grouped(act_PI, w2, counts, self.down if uses is not False else None, mask_P1)
        weighted_PH = torch.empty_like(down_PH)
        weighted_PH[order_P] = down_PH if self.rounds else down_PH * weights_P1.to(down_PH.dtype)
        torch.sum(weighted_PH.view(len(topk_ids), -1, output.shape[1]), dim=1, out=output)

    def _grouped(
        self,
        x_PI: Tensor,
        w_EOI: Tensor,
        counts: list[int],
        adapters: list[StackedAdapter] | None,
        mask_P1: Tensor | None,
    ) -> Tensor:
        """Each expert's rows through its weight and adapter; `counts`: rows of no expert, then of each."""
        y_PO = x_PI.new_zeros(len(x_PI), w_EOI.shape[1])
        product_PI = rounded(x_PI) if self.rounds else x_PI  # adapters are not quantised
        start = counts[0]
        for expert, count in enumerate(counts[1:]):
            if count == 0:
                continue
            at = slice(start, start + count)
            torch.mm(product_PI[at], w_EOI[expert].t(), out=y_PO[at])
            if adapters is not None:
                adapters[expert].add_to(y_PO[at], x_PI[at], None if mask_P1 is None else mask_P1[at])
            start += count
        return y_PO


def install() -> None:
    """Have vLLM choose these experts where they are needed, and hand them their adapters. Safe to call twice."""
    if unquantized.select_unquantized_moe_backend is not _select:
        _stock_select.append(unquantized.select_unquantized_moe_backend)
        unquantized.select_unquantized_moe_backend = oracle.select_unquantized_moe_backend = _select  # ty: ignore[invalid-assignment]
        for layer in (FusedMoEWithLoRA, FusedMoE3DWithLoRA):
            layer.set_lora = _handing_over(layer.set_lora)
        FusedMoEWithLoRA.reset_lora = _taking_back(FusedMoEWithLoRA.reset_lora)


_stock_select: list[Any] = []


def _select(moe_config: Any) -> tuple[Any, type[mk.FusedMoEExperts] | None]:
    if moe_config.is_lora_enabled or os.environ.get(PLAIN_EXPERTS_ENV):
        return oracle.UnquantizedMoeBackend.CPU, PlainExperts
    return _stock_select[0](moe_config)


def _handing_over(set_lora: Any) -> Any:
    def set_and_hand_over(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        set_lora(self, index, lora_a, lora_b)
        rank = lora_a[0].shape[-2]
        sizes = (self.w13_lora_b_stacked[0].shape[2],) * self._w13_slices
        experts: PlainExperts = self._moe_kernel.fused_experts
        experts.gate_up, experts.down = [], []
        for expert in range(self.local_num_experts):
            pairs = [
                (_of_expert(a, expert)[:rank].clone(), _of_expert(b, expert)[:, :rank])
                for a, b in zip(self.w13_lora_a_stacked, self.w13_lora_b_stacked, strict=True)
            ]
            experts.gate_up.append(StackedAdapter(pairs, sizes))
            a, b = _of_expert(self.w2_lora_a_stacked[0], expert), _of_expert(self.w2_lora_b_stacked[0], expert)
            experts.down.append(StackedAdapter([(a[:rank].clone(), b[:, :rank])], (len(b),)))

    return set_and_hand_over


def _of_expert(stacked: Tensor, expert: int) -> Tensor:
    """The expert's matrix of the only adapter; a factor that all experts share is stored once."""
    return stacked[0, min(expert, stacked.shape[1] - 1)]


def _taking_back(reset_lora: Any) -> Any:
    def reset_and_take_back(self: Any, index: int) -> None:
        reset_lora(self, index)
        experts: PlainExperts = self._moe_kernel.fused_experts
        experts.gate_up = experts.down = None

    return reset_and_take_back
