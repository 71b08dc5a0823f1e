"""Megatron-Bridge for Beam: every tensor from a Hugging Face checkpoint into Megatron and back, bit for bit.

Imported by `register.register(megatron=True)`, which first prepares machines without a GPU.
"""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    GatedMLPMapping,
    QKVMapping,
    ReplicatedMapping,
)
from megatron.core.models.gpt import GPTModel

from infra.models.beam import checkpoint
from infra.models.beam.megatron_provider import BeamModelProvider
from infra.models.checkpoint import checkpoint_shapes

_DECODER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn_bda.norm.weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
    "mlp_bda.norm.weight": "post_feedforward_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_gate.weight": "self_attn.gate_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.experts.linear_fc2.weight*": "mlp.experts.*.down_proj.weight",
    "mlp.experts.local_experts.*.linear_fc2.weight": "mlp.experts.*.down_proj.weight",
}
_GATED = {
    "mlp.linear_fc1.weight": "mlp.",
    "mlp.experts.linear_fc1.weight*": "mlp.experts.*.",
    "mlp.experts.local_experts.*.linear_fc1.weight": "mlp.experts.*.",
}


@MegatronModelBridge.register_bridge(
    source="BeamForCausalLM", target=GPTModel, provider=BeamModelProvider, model_type="beam"
)
class BeamBridge(MegatronModelBridge):
    """Names and layouts; expert tensors are found in both of Megatron's layouts (grouped, sequential)."""

    def provider_bridge(self, hf_pretrained: Any) -> BeamModelProvider:
        """The provider of a checkpoint's config.json, in the dtype that it names."""
        provider = BeamModelProvider.from_config(hf_pretrained.config)
        provider.params_dtype = self.dtype_from_hf(hf_pretrained.config, default=provider.params_dtype)
        provider.bf16 = str(provider.params_dtype) == "torch.bfloat16"
        return provider

    def load_weights_hf_to_megatron(self, hf_pretrained: Any, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
        """As Megatron-Bridge's own, after a check that the checkpoint holds what its config describes, and no more."""
        source = hf_pretrained.state.source
        on_disk = hasattr(source, "path")
        found = checkpoint_shapes(source.path) if on_disk else {name: source[name].shape for name in source}
        checkpoint.check(hf_pretrained.config, found)
        return super().load_weights_hf_to_megatron(hf_pretrained, megatron_model, *args, **kwargs)

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Megatron's parameter names to the checkpoint's."""
        ours, theirs = "decoder.layers.*.", "model.layers.*."
        mappings: list[Any] = [
            AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            AutoMapping("decoder.final_layernorm.weight", "model.norm.weight"),
            AutoMapping("output_layer.weight", "lm_head.weight"),
            ColumnParallelMapping(ours + "self_attention.gate_bias", theirs + "self_attn.gate_bias"),
            ReplicatedMapping(ours + "mlp.router.weight", theirs + "mlp.gate.weight"),
            ReplicatedMapping(ours + "mlp.router.expert_bias", theirs + "mlp.gate.e_score_correction_bias"),
            QKVMapping(
                ours + "self_attention.linear_qkv.weight",
                *(theirs + f"self_attn.{name}_proj.weight" for name in "qkv"),
            ),
        ]
        mappings += [AutoMapping(ours + name, theirs + hf_name) for name, hf_name in _DECODER.items()]
        mappings += [
            GatedMLPMapping(ours + name, theirs + prefix + "gate_proj.weight", theirs + prefix + "up_proj.weight")
            for name, prefix in _GATED.items()
        ]
        return MegatronMappingRegistry(*mappings)
