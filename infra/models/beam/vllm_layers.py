"""The layers of a Beam in vLLM's terms; what they compute, and where they round, is in semantics.py."""

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_ep_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import direct_register_custom_op

from infra.models.beam.config import BeamConfig
from infra.models.beam.semantics import output_gate, residual_add, residual_scales, rms_norm, ssmax, swiglu


def _residual_add(h: torch.Tensor, y: torch.Tensor, x: float, r: float) -> torch.Tensor:
    return residual_add(h, y, (x, r))


def _residual_add_fake(h: torch.Tensor, y: torch.Tensor, x: float, r: float) -> torch.Tensor:
    return torch.empty_like(h)


# Opaque to torch.compile: Inductor would fuse the two products and the sum and keep them in fp32 between, where the
# model (and the trainer) rounds each of them to the activation dtype.
direct_register_custom_op("beam_residual_add", _residual_add, fake_impl=_residual_add_fake)


class BeamRMSNorm(nn.Module):
    """RMSNorm over the last dimension in fp32, rounded once. vLLM's own rounds before the weight as well."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class BeamAttention(nn.Module):
    """Grouped-query attention with per-head Q/K norms and a sigmoid gate, as wide as q, on its output.

    Sliding layers have neox RoPE and a window (q - k < sliding_window); full layers have no positions, but queries
    scaled by theirs (SSMax).
    """

    def __init__(
        self,
        config: BeamConfig,
        layer: int,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        hidden, heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.heads = heads // ranks
        self.kv_heads = max(1, config.num_key_value_heads // ranks)
        self.sliding = config.layer_types[layer] == "sliding_attention"
        self.qkv_proj = QKVParallelLinear(
            hidden,
            self.head_dim,
            heads,
            config.num_key_value_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.gate_proj = ColumnParallelLinear(
            hidden, heads * self.head_dim, bias=False, quant_config=quant_config, prefix=f"{prefix}.gate_proj"
        )
        self.o_proj = RowParallelLinear(
            heads * self.head_dim, hidden, bias=False, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        self.q_norm = BeamRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = BeamRMSNorm(self.head_dim, config.rms_norm_eps)
        self.gate_bias = nn.Parameter(torch.zeros(self.heads))
        set_weight_attrs(self.gate_bias, {"weight_loader": sharded_weight_loader(0)})
        self.rotary_emb = None
        if self.sliding:
            self.rotary_emb = get_rope(
                self.head_dim,
                max_position=config.max_position_embeddings,
                is_neox_style=True,
                rope_parameters=config.rope_parameters,
            )
        self.attn = Attention(
            self.heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=config.sliding_window if self.sliding else None,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """positions [tokens] int64, x [tokens, hidden] -> [tokens, hidden]."""
        qkv, _ = self.qkv_proj(x)
        gate, _ = self.gate_proj(x)
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
        q = self.q_norm(q.reshape(-1, self.heads, self.head_dim))
        k = self.k_norm(k.reshape(-1, self.kv_heads, self.head_dim)).flatten(-2)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q.flatten(-2), k)
        else:
            q = ssmax(q, positions).flatten(-2)
        attended = self.attn(q, k, v).view(-1, self.heads, self.head_dim)
        output, _ = self.o_proj(output_gate(attended, gate.view_as(attended), self.gate_bias).flatten(-2))
        return output


class BeamMLP(nn.Module):
    """The SwiGLU of a dense layer; silu(gate) * up rounds once (vLLM's own rounds twice)."""

    def __init__(self, config: BeamConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [width] * 2, bias=False, quant_config=quant_config, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            width, hidden, bias=False, quant_config=quant_config, prefix=f"{prefix}.down_proj"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, dim=-1)
        output, _ = self.down_proj(swiglu(gate, up))
        return output


class BeamRouter(nn.Module):
    """The router of a sparse layer and its correction bias, fp32 whatever the model's dtype.

    A plain module, not one of vLLM's linear layers: nothing prepacks, quantizes, shards or adapts it.
    """

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> logits [tokens, experts] fp32."""
        return F.linear(x.float(), self.weight)


class BeamMoE(nn.Module):
    """Sparse layer: sigmoid scores, selection with the correction bias among the best groups, no shared expert."""

    def __init__(
        self, config: BeamConfig, vllm_config: VllmConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        parallel = vllm_config.parallel_config
        self.logical_experts = config.num_experts
        self.redundant_experts = parallel.eplb_config.num_redundant_experts
        self.physical_experts = self.logical_experts + self.redundant_experts
        self.local_physical_experts = self.physical_experts // get_ep_group().device_group.size()
        self.gate = BeamRouter(config)
        # Without groups a token chooses among one group of all experts: the same choice, by the same kernels.
        groups, kept = (config.n_group, config.topk_group) if config.grouped_routing else (1, 1)
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            use_grouped_topk=True,
            num_expert_group=groups,
            topk_group=kept,
            scoring_func="sigmoid",
            routed_scaling_factor=config.routed_scaling_factor,
            e_score_correction_bias=self.gate.e_score_correction_bias,
            router_logits_dtype=torch.float32,
            quant_config=quant_config,
            enable_eplb=parallel.enable_eplb,
            num_redundant_experts=self.redundant_experts,
            prefix=f"{prefix}.experts",
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden_states=x, router_logits=self.gate(x))


class BeamDecoderLayer(nn.Module):
    """Sandwich norm: h = R*h + X*post_norm(sublayer(pre_norm(h))), for attention and for the MLP or MoE."""

    def __init__(self, config: BeamConfig, layer: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.attention_scales, self.mlp_scales = residual_scales(layer, True), residual_scales(layer, False)
        quant_config = vllm_config.quant_config
        self.self_attn = BeamAttention(config, layer, vllm_config.cache_config, quant_config, f"{prefix}.self_attn")
        if config.mlp_layer_types[layer] == "sparse":
            self.mlp = BeamMoE(config, vllm_config, quant_config, f"{prefix}.mlp")
        else:
            self.mlp = BeamMLP(config, quant_config, f"{prefix}.mlp")
        self.input_layernorm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """positions [tokens] int64, h [tokens, hidden] -> [tokens, hidden]."""
        attended = self.self_attn(positions, self.input_layernorm(h))
        h = torch.ops.vllm.beam_residual_add(h, self.post_attention_layernorm(attended), *self.attention_scales)
        fed = self.mlp(self.pre_feedforward_layernorm(h))
        return torch.ops.vllm.beam_residual_add(h, self.post_feedforward_layernorm(fed), *self.mlp_scales)
