"""Beam in Megatron on one process: golden values, bits, gradients, and what is Beam's own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import BadInput
from infra.models import megatron_cpu
from infra.models.beam.checkpoint import LORA_TARGETS
from infra.models.beam.config import BeamConfig
from infra.models.beam.modeling import BeamForCausalLM, BeamRouter
from tests.integration.beam.family import BEAM
from tests.support.family import LOGITS, hf_model
from tests.support.megatron_parity import MegatronParity
from tests.support.megatron_runs import Built, Layout, build, gradients, logits

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 8,
    "initializer_range": 0.2,
}
OTHERS: dict[str, dict[str, Any]] = {
    "as published: no groups, no cap, sliding and sparse throughout": {"num_experts": 16, "num_experts_per_tok": 8},
    "one expert a token, normalised to weight 1": {"num_experts": 4, "num_experts_per_tok": 1},
    "weights not normalised": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "groups of which Megatron would sum four": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "dense and full throughout": {
        "mlp_layer_types": ["dense"] * 3,
        "layer_types": ["full_attention"] * 3,
        "final_logit_softcapping": 5.0,
    },
}


class TestBeam(MegatronParity):
    family = BEAM

    def test_position_ids_are_honoured(self, built: Built) -> None:
        """A sequence that starts at position 5000: sliding layers see the same, full layers sharpen by position."""
        ids = BEAM.values()["input_ids"]
        positions = torch.arange(5000, 5000 + ids.shape[1]).expand_as(ids)
        with torch.no_grad(), megatron_cpu.cuda_means_cpu():
            ours = built.chunks[0].eval()(ids, positions, None)
            theirs = hf_model(BEAM.golden)(ids, position_ids=positions).logits
        assert (ours - theirs).abs().max() < 2 * LOGITS
        assert (ours - BEAM.values()["logits"]).abs().max() > 0.01
        with pytest.raises(ValueError, match="position_ids"), megatron_cpu.cuda_means_cpu():
            built.chunks[0](ids, None, None)

    def test_the_router_counts_its_choices_for_the_bias_update(self, built: Built) -> None:
        routers = [module for module in built.chunks[0].modules() if type(module).__name__ == "BeamTopKRouter"]
        for router in routers:
            router.local_tokens_per_expert.zero_()
        ids = BEAM.values()["input_ids"]
        with megatron_cpu.cuda_means_cpu():
            built.chunks[0].train()(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
        expected = BEAM.values()["routes"]
        for layer, router in enumerate(routers):
            counts = torch.bincount(expected[:, :, layer].flatten().long(), minlength=router.num_experts)
            assert torch.equal(router.local_tokens_per_expert.long(), counts)

    def test_recomputation_gives_the_same_gradients(self, built: Built) -> None:
        ids = BEAM.values()["input_ids"]
        plain = gradients(built, ids)
        whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        core = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        for settings in (whole, core):
            again = gradients(build(BEAM, layout=Layout(settings=settings)), ids)
            for name, gradient in plain.items():
                assert (again[name] - gradient).norm() <= 1e-6 * gradient.norm(), name

    def test_lora_adapts_what_its_targets_name_and_exports_a_projection_each(self) -> None:
        from megatron.bridge.peft.lora import LoRA

        built = build(BEAM)
        with megatron_cpu.cuda_means_cpu():
            model = built.chunks[0].module
            LoRA(target_modules=list(LORA_TARGETS), dim=4, alpha=8)([model], training=True)
            for name, parameter in model.named_parameters():
                if "adapter.linear_out" in name:
                    torch.nn.init.normal_(parameter)
            adapters = dict(built.bridge.export_adapter_weights([model], show_progress=False))
            merged = dict(built.bridge.export_hf_weights([model], show_progress=False))
        source = BEAM.tensors()
        adapted = [name for name in source if name.endswith("_proj.weight")]
        for name in adapted:
            stem = next(key for key in adapters if key.endswith(name.replace(".weight", ".lora_A.weight")))
            a, b = adapters[stem], adapters[stem.replace("lora_A", "lora_B")]
            assert torch.allclose(merged[name], source[name] + 2.0 * b @ a, atol=1e-5), name
        assert len(adapters) == 2 * len(adapted)
        for name in source.keys() - set(adapted):
            assert torch.equal(merged[name], source[name]), name

    @pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS.keys())
    def test_other_beams_too_are_those_of_transformers(self, tmp_path: Path, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = BeamForCausalLM(BeamConfig(**SMALL | settings)).eval()
        for module in model.modules():
            if isinstance(module, BeamRouter):
                module.e_score_correction_bias.normal_(std=0.1)
        model.save_pretrained(tmp_path)
        ids = torch.randint(128, (2, 24))
        with torch.no_grad():
            theirs = model(ids).logits
        assert (logits(build(BEAM, tmp_path), ids) - theirs).abs().max() < LOGITS

    def test_parallel_sizes_that_would_be_wrong_are_refused(self) -> None:
        BEAM.register()
        from infra.models.beam.megatron_provider import BeamModelProvider

        provider = BeamModelProvider.from_config(BeamConfig(**SMALL | {"vocab_size": 129}))
        provider.tensor_model_parallel_size = 2
        with pytest.raises(BadInput, match=r"tensor parallel size = 2.*vocab_size \(129\)"):
            provider.provide()
        provider = BeamModelProvider.from_config(BeamConfig(**SMALL))
        provider.pipeline_model_parallel_size = provider.virtual_pipeline_model_parallel_size = 2
        with pytest.raises(BadInput, match="overlap_p2p_comm=True"):
            provider.provide()
