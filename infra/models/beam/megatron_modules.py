"""Beam's layers in Megatron-Core: only what differs from Megatron's own modules.

Shapes: S tokens (after tensor parallelism has gathered them), B sequences, D hidden_size, H and G the query and
key/value heads of this rank, K head_dim, N = S * B, E experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from infra.models.beam.semantics import (
    choose_experts,
    expert_weights,
    output_gate,
    residual_add,
    residual_scales,
    rms_norm,
    rotate,
    soft_cap,
    ssmax,
    swiglu,
)


class BeamNorm(nn.Module):
    """RMSNorm over the last dimension in fp32, rounded once. Megatron's own torch norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees a part of the tokens then: Megatron sums such a gradient over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], x's dtype."""
        return rms_norm(x, self.weight, self.eps)


class BeamSwiGLU(nn.Module):
    """The activation of an MLP's first product: gate and up side by side [..., 2F] -> [..., F], rounded once."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """silu(gate) * up."""
        return swiglu(*gate_and_up.chunk(2, -1))


class DepthScaledAdd(nn.Module):
    """Where Megatron has bias-dropout-add: h = R * h + X * norm(y), the residual of a sandwich-normed sublayer."""

    def __init__(self, config: TransformerConfig, layer: int, is_attention: bool) -> None:
        super().__init__()
        self.scales = residual_scales(layer, is_attention)
        self.norm = BeamNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """Megatron asks for the function first, then calls it with ((y, no bias), h, dropout)."""

        def add(output: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
            return residual_add(residual, self.norm(output[0]), self.scales)

        return add


class BeamSelfAttention(SelfAttention):
    """Megatron's self attention, with Beam's positions between the q/k norms and the core, and a gate after it."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.is_sliding = config.layer_types[layer_number - 1] == "sliding_attention"
        # A projection of its own, so that linear_qkv keeps Megatron's usual layout, which bridge and LoRA know.
        self.linear_gate = submodules.linear_qkv(
            config.hidden_size,
            self.query_projection_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="gate",
            tp_group=self.pg_collection.tp,
        )
        heads = config.num_attention_heads // self.pg_collection.tp.size()
        self.gate_bias = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.gate_bias, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        attention_bias: Tensor | None = None,
        inference_context: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """[S, B, D] -> ([S, B, D], no bias). `rotary_pos_emb` carries the positions [S, B], see BeamGPTModel."""
        if inference_context is not None:
            raise NotImplementedError("Beam in Megatron has no KV cache: it trains here and generates in vLLM")
        if self.is_sliding and attention_mask is not None and isinstance(self.core_attention, DotProductAttention):
            raise ValueError("Megatron's DotProductAttention drops an attention mask in sliding layers; pass None")
        q_SBHK, k_SBGK, v_SBGK = self.get_query_key_value_tensors(hidden_states)
        gate_SBX, _ = self.linear_gate(hidden_states)
        positions_SB = rotary_pos_emb
        if self.is_sliding:
            q_SBHK = rotate(q_SBHK, positions_SB, self.config.rotary_base)
            k_SBGK = rotate(k_SBGK, positions_SB, self.config.rotary_base)
        else:
            q_SBHK = ssmax(q_SBHK, positions_SB)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        qkv = [x.squeeze(1) for x in (q_SBHK, k_SBGK, v_SBGK)] if packed else [q_SBHK, k_SBGK, v_SBGK]
        recompute = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if recompute else self._run_core_attention
        attention = attend(
            *qkv,
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
        )
        heads = (*gate_SBX.shape[:2], -1, self.hidden_size_per_attention_head)
        gated_SBHK = output_gate(attention.reshape(heads), gate_SBX.view(heads), self.gate_bias)
        output, _ = self.linear_proj(gated_SBHK.flatten(-2))
        return output, None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's, in which gate_bias is split over the tensor-parallel ranks."""
        states = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        states |= make_sharded_tensors_for_checkpoint(
            {"gate_bias": self.gate_bias},
            prefix,
            {"gate_bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return states


class BeamTopKRouter(TopKRouter):
    """Megatron's router, kept in fp32, with Beam's group scores and its choice whether weights are normalised."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.is_aux_loss_enabled() or config.moe_expert_capacity_factor is not None:
            raise ValueError("a Beam router has no auxiliary loss and drops no token; its bias balances the experts")

    def reset_parameters(self) -> None:
        """Megatron casts the new weight to the model's dtype; a router keeps its own."""
        if self.config.perform_initialization:
            self.config.init_method(self.weight)
        self.weight.sequence_parallel = self.config.sequence_parallel

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] fp32 -> (weights [N, E] fp32, 0 where not chosen; chosen [N, E] bool). Replay applies."""
        config = self.config
        logits_NE = self.apply_z_loss(logits.view(-1, config.num_moe_experts), padding_mask=padding_mask)
        scores_NE = torch.sigmoid(logits_NE)
        # Without a gradient, but not under no_grad: a replay tells by it whether this is a forward that is computed again.
        chosen = self._choose(scores_NE.detach() + self.expert_bias)
        weights = expert_weights(
            scores_NE.gather(1, chosen), config.norm_topk_prob, config.moe_router_topk_scaling_factor
        )
        map_NE = torch.zeros_like(logits_NE, dtype=torch.bool).scatter(1, chosen, True)
        if torch.is_grad_enabled():  # for the update of the bias: not when evaluating, not twice when recomputing
            counted = map_NE if padding_mask is None else map_NE & ~padding_mask.reshape(-1, 1)
            self.local_tokens_per_expert += counted.sum(0)
        return torch.zeros_like(logits_NE).scatter(1, chosen, weights), map_NE

    def _choose(self, selection_NE: Tensor) -> Tensor:
        """Expert ids [N, topk]: the best by score and bias, or those that are being replayed."""

        def best(scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None) -> tuple:
            chosen = choose_experts(scores, topk, num_groups, group_topk)
            return scores.gather(1, chosen), chosen

        limits = (self.topk, self.config.moe_router_num_groups, self.config.moe_router_group_topk)
        if self.router_replay is None:
            return best(selection_NE, *limits)[1]
        return self.router_replay.get_replay_topk(selection_NE, *limits, best)[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BeamTopKRouter":
        """Follow moves between devices, but no cast of the model: fp32 to bf16 and back would lose bits."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


class BeamGPTModel(GPTModel):
    """GPTModel whose layers get each token's own position, and whose logits are capped where the config says so.

    `position_ids` [B, S] must be given on every pipeline stage; in a packed row they start at 0 in each sequence.
    """

    def _preprocess(self, *args: Any, position_ids: Tensor, **kwargs: Any) -> tuple:
        decoder_input, _, *rest = super()._preprocess(*args, position_ids=position_ids, **kwargs)
        if position_ids is None:
            raise ValueError("Beam needs position_ids on every pipeline stage: full layers scale by position")
        return decoder_input, position_ids.transpose(0, 1).contiguous(), *rest

    def _scale_logits(self, logits: Tensor) -> Tensor:
        return soft_cap(super()._scale_logits(logits), self.config.final_logit_softcapping)
