"""BeamForCausalLM for transformers: the reading copy of the model, and what reads and writes its checkpoints.

Shapes in comments and docstrings: B sequences, T tokens, D hidden_size, H query heads, G key/value heads, K head_dim,
E experts, V vocabulary. Rounding follows the published inference semantics: norms, SwiGLU, rotation, gate and residual
sums compute in fp32; each rounds once to the model's dtype, except that a residual sum rounds both its products.
"""

import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils.generic import can_return_tuple

from infra.models.beam import checkpoint
from infra.models.beam.config import BeamConfig
from infra.models.beam.semantics import (
    output_gate,
    residual_add,
    residual_scales,
    rms_norm,
    rotate,
    route,
    soft_cap,
    ssmax,
    swiglu,
)


class BeamRMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32, rounded once to x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], x's dtype."""
        return rms_norm(x, self.weight, self.eps)


class BeamMLP(nn.Module):
    """SwiGLU: [..., D] -> [..., D]. A dense layer's MLP, and one expert of a sparse layer."""

    def __init__(self, config: BeamConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class BeamRouter(nn.Module):
    """Chooses each token's experts. Weight and correction bias are fp32 and stay so, whatever the model is cast to."""

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size, dtype=torch.float32))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, D] -> (logits [N, E] fp32, weights [N, topk] fp32, expert ids [N, topk] int64)."""
        logits = nn.functional.linear(x.float(), self.weight)
        weights, experts = route(logits, self.e_score_correction_bias, self.config)
        return logits, weights, experts

    def _apply(self, fn: Any, recurse: bool = True) -> "BeamRouter":
        """Follow `.to(device)` and the like, but let no cast reach the router: fp32 to bf16 and back loses bits."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


class BeamSparseMLP(nn.Module):
    """A sparse layer's MLP: each token's experts, weighted and summed in fp32. [B, T, D] -> [B, T, D]"""

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.gate = BeamRouter(config)
        self.experts = nn.ModuleList(BeamMLP(config, config.moe_intermediate_size) for _ in range(config.num_experts))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Routes each token by itself; the sum over its experts rounds once."""
        x_ND = x_BTD.flatten(0, -2)
        _, weights, chosen = self.gate(x_ND)
        total = torch.zeros_like(x_ND, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            out = self.experts[expert](x_ND[token]).float() * weights[token, slot, None]
            total = total.index_add(0, token, out)
        return total.to(x_BTD.dtype).view_as(x_BTD)


class BeamAttention(nn.Module):
    """Gated grouped-query attention: sliding layers rotate q and k (RoPE), full layers scale q by position (SSMax)."""

    def __init__(self, config: BeamConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal, self.attention_dropout = True, 0.0
        self.is_sliding = config.layer_types[layer] == "sliding_attention"
        self.sliding_window = config.sliding_window if self.is_sliding else None
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.gate_bias = nn.Parameter(torch.zeros(config.num_attention_heads))
        self.q_norm = BeamRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = BeamRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, x_BTD: Tensor, mask: Tensor | None, positions_BT: Tensor, cache: Cache | None = None, **kwargs: Any
    ) -> Tensor:
        """`mask` is transformers' for this kind of layer; `cache` keeps rotated keys, and of a sliding layer only its window."""
        heads = (*x_BTD.shape[:-1], -1, self.head_dim)
        q_BTHK, k_BTGK = self.q_norm(self.q_proj(x_BTD).view(heads)), self.k_norm(self.k_proj(x_BTD).view(heads))
        v_BGTK = self.v_proj(x_BTD).view(heads).transpose(1, 2)
        if self.is_sliding:
            theta = self.config.rope_parameters["rope_theta"]
            q_BTHK, k_BTGK = rotate(q_BTHK, positions_BT, theta), rotate(k_BTGK, positions_BT, theta)
        else:
            q_BTHK = ssmax(q_BTHK, positions_BT)
        q_BHTK, k_BGTK = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2)
        if cache is not None:
            k_BGTK, v_BGTK = cache.update(k_BGTK, v_BGTK, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out_BTHK, _ = attend(
            self,
            q_BHTK,
            k_BGTK,
            v_BGTK,
            mask,
            scaling=self.scaling,
            dropout=0.0,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        gated = output_gate(out_BTHK, self.gate_proj(x_BTD).view(heads), self.gate_bias)
        return self.o_proj(gated.flatten(-2))


class BeamDecoderLayer(GradientCheckpointingLayer):
    """h = R * h + X * post_norm(sublayer(pre_norm(h))), once for attention and once for the MLP. [B, T, D] -> [B, T, D]"""

    def __init__(self, config: BeamConfig, layer: int) -> None:
        super().__init__()
        self.attention_scales = residual_scales(layer, is_attention=True)
        self.mlp_scales = residual_scales(layer, is_attention=False)
        self.self_attn = BeamAttention(config, layer)
        sparse = config.mlp_layer_types[layer] == "sparse"
        self.mlp = BeamSparseMLP(config) if sparse else BeamMLP(config, config.intermediate_size)
        self.input_layernorm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, h_BTD: Tensor, mask: Tensor | None, positions_BT: Tensor, **kwargs: Any) -> Tensor:
        """Both sublayers; see `residual_scales` for R and X."""
        attention = self.self_attn(
            self.input_layernorm(h_BTD), mask, positions_BT, kwargs.pop("past_key_values", None), **kwargs
        )
        h_BTD = residual_add(h_BTD, self.post_attention_layernorm(attention), self.attention_scales)
        mlp = self.mlp(self.pre_feedforward_layernorm(h_BTD))
        return residual_add(h_BTD, self.post_feedforward_layernorm(mlp), self.mlp_scales)


class BeamPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of every Beam: how to initialise it, and that its checkpoints are exact."""

    config_class = BeamConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["BeamDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [re.escape(name) for name in checkpoint.ROUTER_TENSORS]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BeamRouter):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, BeamAttention):
            init.zeros_(module.gate_bias)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers' own, but tensors that are missing, too many or misshapen are a BadInput, not a warning."""
        kwargs["ignore_mismatched_sizes"] = True  # so that they are listed below with all other faults
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for name in info["missing_keys"]:
            found.pop(name, None)
        found |= dict.fromkeys(info["unexpected_keys"], ())
        found |= {name: tuple(shape) for name, shape, _ in info["mismatched_keys"]}
        checkpoint.check(model.config, found)
        return (model, info) if output_loading_info else model


class BeamModel(BeamPreTrainedModel):
    """The decoder without its head: token ids [B, T] -> hidden states [B, T, D] after the last norm."""

    def __init__(self, config: BeamConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(BeamDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """`attention_mask` [B, T] is 0 where padded; `position_ids` [B, T] count from 0, also in full layers (SSMax)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        h_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not (self.gradient_checkpointing and self.training):
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(h_BTD.shape[1], device=h_BTD.device) + seen).unsqueeze(0)
        masks = attention_mask
        if not isinstance(masks, dict):
            known = {
                "config": self.config,
                "inputs_embeds": h_BTD,
                "attention_mask": attention_mask,
                "past_key_values": past_key_values,
                "position_ids": position_ids,
            }
            build = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
            masks = {kind: build[kind](**known) for kind in set(self.config.layer_types)}
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            h_BTD = layer(h_BTD, masks[kind], position_ids, past_key_values=past_key_values, **kwargs)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(h_BTD), past_key_values=past_key_values)


class BeamForCausalLM(BeamPreTrainedModel, GenerationMixin):
    """Token ids [B, T] -> logits [B, T, V], fp32 and capped where the config says so."""

    def __init__(self, config: BeamConfig) -> None:
        super().__init__(config)
        self.model = BeamModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """The usual arguments of a causal language model; `labels` [B, T] add the mean next-token loss."""
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = soft_cap(self.lm_head(outputs.last_hidden_state[:, kept]), self.config.final_logit_softcapping)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)
