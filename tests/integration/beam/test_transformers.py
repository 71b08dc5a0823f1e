"""BeamForCausalLM against the golden values, its checkpoints, its cache, and what bf16 may cost."""

import pytest
import torch
from torch import Tensor

from infra.errors import BadInput
from infra.models.beam.config import BeamConfig
from infra.models.beam.modeling import BeamForCausalLM, BeamRouter
from infra.models.beam.semantics import expert_weights
from tests.integration.beam.family import BEAM
from tests.support.family import TransformersParity, copy_checkpoint, hf_model, in_bf16


class TestBeam(TransformersParity):
    family = BEAM

    def test_bf16_logits_stay_within_bf16_rounding_of_fp32(self, tmp_path) -> None:
        """With the same weights and the golden routes, bf16 activations move the logits by less than 8% of their RMS.

        Each rounding is 2^-9 at most; some hundred of them lie one after the other in four layers with large random
        weights. Routes are fixed because a token near a tie may else choose another expert, which is no rounding error.
        """
        folder = copy_checkpoint(BEAM, tmp_path, in_bf16(BEAM, BEAM.tensors()))
        exact, rounded = (
            logits_with_golden_routes(hf_model(folder, dtype)) for dtype in (torch.float32, torch.bfloat16)
        )
        assert (rounded - exact).square().mean().sqrt() < 0.08 * exact.square().mean().sqrt()

    def test_a_checkpoint_with_tied_embeddings_is_refused(self, tmp_path) -> None:
        folder = copy_checkpoint(BEAM, tmp_path, BEAM.tensors())
        text = (
            (folder / "config.json").read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
        )
        (folder / "config.json").write_text(text)
        with pytest.raises(BadInput, match="tie_word_embeddings"):
            hf_model(folder)

    def test_a_new_model_starts_with_open_router_and_finite_loss(self) -> None:
        torch.manual_seed(0)
        model = BeamForCausalLM(BeamConfig.from_pretrained(BEAM.golden))
        ids = BEAM.values()["input_ids"]
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            unused = parameter.grad is None and ".experts." in name  # an expert that no token chose
            assert unused or torch.isfinite(parameter.grad).all(), name
        for module in model.modules():
            if isinstance(module, BeamRouter):
                assert module.weight.std() > 0 and not module.e_score_correction_bias.any()


def logits_with_golden_routes(model: BeamForCausalLM) -> Tensor:
    golden = BEAM.values()
    routers = [module for module in model.modules() if isinstance(module, BeamRouter)]
    for layer, router in enumerate(routers):

        def choose(module: BeamRouter, _: tuple, out: tuple[Tensor, ...], layer: int = layer) -> tuple[Tensor, ...]:
            chosen = golden["routes"][:, :, layer].flatten(0, 1).long()
            config = module.config
            scores = out[0].sigmoid().gather(-1, chosen)
            return out[0], expert_weights(scores, config.norm_topk_prob, config.routed_scaling_factor), chosen

        router.register_forward_hook(choose)
    with torch.no_grad():
        return model(golden["input_ids"]).logits
