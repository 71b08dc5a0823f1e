"""Builds Beam in Megatron: its configuration as a Megatron-Bridge provider, and the layer specs of a pipeline stage."""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider, get_backend
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_pg_rank

from infra.errors import BadInput
from infra.models.beam.config import BeamConfig
from infra.models.beam.megatron_modules import (
    BeamGPTModel,
    BeamNorm,
    BeamSelfAttention,
    BeamSwiGLU,
    BeamTopKRouter,
    DepthScaledAdd,
)


def block_spec(config: "BeamModelProvider", vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage (or virtual stage), even or uneven; each is told its place in the whole model."""
    pp_rank = get_pg_rank(config._pg_collection.pp) if config._pg_collection is not None else None
    if config.pipeline_model_parallel_layout is not None:
        layers = config.pipeline_model_parallel_layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
        layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank))
    backend = get_backend("transformer_engine" if HAVE_TE and torch.cuda.is_available() else "local")
    return TransformerBlockSubmodules([layer_spec(config, layer, backend) for layer in layers], layer_norm=BeamNorm)


def layer_spec(config: "BeamModelProvider", layer: int, backend: BackendSpecProvider) -> ModuleSpec:
    """The spec of the 0-based layer: Megatron's layer, with Beam's parts where they differ."""
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=config.core_attention or backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=BeamNorm,
        k_layernorm=BeamNorm,
    )
    sparse = config.mlp_layer_types[layer] == "sparse"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=BeamNorm,
            self_attention=ModuleSpec(
                module=BeamSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=_residual(config, layer, is_attention=True),
            pre_mlp_layernorm=BeamNorm,
            mlp=_sparse_mlp(config, backend) if sparse else _dense_mlp(config, backend),
            mlp_bda=_residual(config, layer, is_attention=False),
        ),
    )


def _residual(config: "BeamModelProvider", layer: int, is_attention: bool) -> ModuleSpec:
    return ModuleSpec(DepthScaledAdd, params={"config": config, "layer": layer, "is_attention": is_attention})


def _dense_mlp(config: "BeamModelProvider", backend: BackendSpecProvider) -> Any:
    submodules = MLPSubmodules(
        linear_fc1=backend.column_parallel_linear(),
        linear_fc2=backend.row_parallel_linear(),
        activation_func=BeamSwiGLU,
    )
    return partial(MLP.as_mlp_submodule, submodules=submodules, ffn_hidden_size=config.ffn_hidden_size)


def _sparse_mlp(config: "BeamModelProvider", backend: BackendSpecProvider) -> Any:
    experts = backend.grouped_mlp_modules(config.moe_grouped_gemm)
    submodules = dataclasses.replace(experts.keywords["submodules"], activation_func=BeamSwiGLU)
    experts = partial(experts.func, submodules=submodules)
    return partial(MoELayer, submodules=MoESubmodules(experts=experts, router=BeamTopKRouter))


@dataclass
class BeamModelProvider(GPTModelProvider):
    """Megatron's configuration of a Beam. `from_config` fills it; parallel sizes and precision are set afterwards."""

    transformer_layer_spec: Any = block_spec
    layer_types: list[str] = field(default_factory=list)
    """Of every layer: full_attention or sliding_attention."""
    mlp_layer_types: list[str] = field(default_factory=list)
    """Of every layer: dense or sparse."""
    norm_topk_prob: bool = True
    """Whether the chosen experts' weights are divided by their sum."""
    final_logit_softcapping: float | None = None
    """Cap of the logits, cap * tanh(logits / cap); None for none."""
    core_attention: Any = None
    """Another core attention than the backend's. It must honour config.window_size in sliding layers."""
    beam: BeamConfig | None = None
    """The Hugging Face configuration that this one was made from."""

    @classmethod
    def from_config(cls, config: BeamConfig) -> "BeamModelProvider":
        """The provider of a Hugging Face configuration, in fp32, on one rank."""
        sparse = [int(kind == "sparse") for kind in config.mlp_layer_types]
        sliding = [int(kind == "sliding_attention") for kind in config.layer_types]
        moe = {
            "num_moe_experts": config.num_experts,
            "moe_layer_freq": sparse,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_num_groups": config.n_group if config.grouped_routing else None,
            "moe_router_group_topk": config.topk_group if config.grouped_routing else None,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": HAVE_TE and torch.cuda.is_available(),
            "moe_token_dispatcher_type": "alltoall" if torch.cuda.is_available() else "allgather",
        }
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            vocab_size=config.vocab_size,
            seq_length=config.max_position_embeddings,
            layernorm_epsilon=config.rms_norm_eps,
            init_method_std=config.initializer_range,
            rotary_base=config.rope_parameters["rope_theta"],
            position_embedding_type="rope",
            window_size=(config.sliding_window - 1, 0) if any(sliding) else None,
            window_attn_skip_freq=sliding,
            normalization="RMSNorm",
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            use_te_activation_func=True,  # has Megatron call BeamSwiGLU, which rounds once
            add_bias_linear=False,
            share_embeddings_and_output_weights=False,
            should_pad_vocab=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attention_softmax_in_fp32=True,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            cross_entropy_loss_fusion=False,  # its backward rounds to bf16, whatever the logits are
            params_dtype=torch.float32,
            layer_types=list(config.layer_types),
            mlp_layer_types=list(config.mlp_layer_types),
            norm_topk_prob=config.norm_topk_prob,
            final_logit_softcapping=config.final_logit_softcapping,
            beam=config,
            **(moe if any(sparse) else {}),
        )

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> BeamGPTModel:
        """One rank's part of the model. BadInput where the parallel sizes do not fit it."""
        if self.beam is not None:
            self.beam.check_tensor_parallel(self.tensor_model_parallel_size)
        if self.vocab_size % self.tensor_model_parallel_size:
            size = self.tensor_model_parallel_size
            raise BadInput(f"tensor parallel size = {size}: it must divide vocab_size ({self.vocab_size})")
        vp_size = self.virtual_pipeline_model_parallel_size
        if vp_size and self.pipeline_model_parallel_size == 2 and not self.overlap_p2p_comm:
            # Megatron would then batch four messages between the same two ranks, and mistake them for each other.
            raise BadInput(
                "virtual pipeline stages on 2 ranks: set overlap_p2p_comm=True and batch_p2p_comm=False, or gradients are wrong"
            )
        pp = self._pg_collection.pp
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_first_stage(pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_last_stage(pp)
        return BeamGPTModel(
            self,
            transformer_layer_spec=self.transformer_layer_spec(self, vp_stage=vp_stage),
            vocab_size=self.vocab_size,
            max_sequence_length=self.seq_length,
            parallel_output=self.parallel_output,
            share_embeddings_and_output_weights=False,
            position_embedding_type=self.position_embedding_type,
            rotary_base=self.rotary_base,
            pre_process=pre_process,
            post_process=post_process,
            scatter_embedding_sequence_parallel=self.scatter_embedding_sequence_parallel,
            pg_collection=self._pg_collection,
            vp_stage=vp_stage,
        )
