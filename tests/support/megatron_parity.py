"""What every family must pass in Megatron on one process: subclass `MegatronParity` as `TestX` and set `family`."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from infra.errors import BadInput
from infra.models import megatron_cpu
from tests.support.family import LOGITS, Family, assert_same_tensors, copy_checkpoint, hf_model, in_bf16, same_sets
from tests.support.megatron_runs import Built, build, gradients, logits

GRADIENTS = 1e-4
"""Greatest relative difference (L2, a tensor) of an fp32 gradient from the one of transformers."""
BF16 = 0.08
"""Greatest RMS of what bf16 moves the logits by, relative to the logits' RMS, with routes fixed: a rounding is 2^-9 at
most, and some hundred of them lie one after the other in a golden model of four layers with large random weights."""


def recorded_routes(built: Built, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, routes [B, T, sparse layers, topk]) with Megatron's RouterReplay recording."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    whole = _one_forward(built, ids_BT)
    routes = torch.stack(RouterReplay.get_recorded_data(), 1)  # tokens are ordered [T, B]
    RouterReplay.clear_global_router_replay_action()
    batch, length = ids_BT.shape
    return whole, routes.view(length, batch, *routes.shape[1:]).transpose(0, 1)


def replayed_logits(built: Built, ids_BT: Tensor, routes_BTLK: Tensor) -> Tensor:
    """Logits with each token's experts given, by Megatron's RouterReplay."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.set_replay_data([r.transpose(0, 1).flatten(0, 1).long() for r in routes_BTLK.unbind(2)])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    whole = _one_forward(built, ids_BT)
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()
    return whole


def _one_forward(built: Built, ids_BT: Tensor) -> Tensor:
    positions = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    built.chunks[0].eval()
    with torch.no_grad(), megatron_cpu.cuda_means_cpu():
        return built.chunks[0](ids_BT, positions, None).float()


class MegatronParity:
    family: Family

    @pytest.fixture(scope="class")
    def built(self) -> Built:
        return build(self.family, replay=bool(self.family.router))

    def test_logits_and_routes_are_the_golden_ones(self, built: Built) -> None:
        golden = self.family.values()
        assert (logits(built, golden["input_ids"]) - golden["logits"]).abs().max() < LOGITS
        if self.family.router:
            whole, routes = recorded_routes(built, golden["input_ids"])
            assert (whole - golden["logits"]).abs().max() < LOGITS
            assert same_sets(routes, golden["routes"])

    def test_replayed_routes_are_obeyed(self, built: Built) -> None:
        """Replaying its own choice changes nothing; another choice changes the logits."""
        if not self.family.router:
            pytest.skip("a dense family has no routes")
        golden = self.family.values()
        ids, routes = golden["input_ids"], golden["routes"]
        assert (replayed_logits(built, ids, routes) - golden["logits"]).abs().max() < LOGITS
        others = replayed_logits(built, ids, (routes + 1) % (int(routes.max()) + 1))
        assert (others - golden["logits"]).abs().max() > 0.1

    def test_import_and_export_return_every_tensor_bit_for_bit(self, built: Built) -> None:
        assert_same_tensors(built.export(), self.family.tensors())

    def test_gradients_are_finite_and_those_of_transformers(self, built: Built) -> None:
        ids = self.family.values()["input_ids"]
        ours, model = gradients(built, ids), hf_model(self.family.golden)
        model(ids, labels=ids).loss.backward()
        theirs = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert torch.isfinite(ours[name]).all(), name
            assert (ours[name] - gradient).norm() <= GRADIENTS * gradient.norm(), name

    def test_a_bf16_model_keeps_each_tensors_dtype_and_bits(self, tmp_path: Path) -> None:
        """... and its logits stay within bf16 rounding (BF16) of the fp32 model's with the same weights and routes."""
        golden = self.family.values()
        source = in_bf16(self.family, self.family.tensors())
        folder = copy_checkpoint(self.family, tmp_path, source)
        moe = bool(self.family.router)
        rounded = build(self.family, folder, dtype=torch.bfloat16, replay=moe)
        assert_same_tensors(rounded.export(), source)
        ours = (
            replayed_logits(rounded, golden["input_ids"], golden["routes"])
            if moe
            else logits(rounded, golden["input_ids"])
        )
        exact = build(self.family, folder, replay=moe)
        whole = (
            replayed_logits(exact, golden["input_ids"], golden["routes"]) if moe else logits(exact, golden["input_ids"])
        )
        assert (ours - whole).square().mean().sqrt() < BF16 * whole.square().mean().sqrt()

    def test_tensors_missing_extra_or_misshapen_are_named(self, tmp_path: Path) -> None:
        tensors = self.family.tensors()
        tensors.pop("model.layers.1.input_layernorm.weight")
        tensors["model.layers.0.self_attn.bogus.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.ones(7)
        with pytest.raises(BadInput) as error:
            build(self.family, copy_checkpoint(self.family, tmp_path, tensors))
        said = str(error.value)
        assert "1 missing: model.layers.1.input_layernorm.weight" in said
        assert "model.layers.0.self_attn.bogus.weight" in said
        assert "model.norm.weight is [7] instead of [" in said

    def test_a_tensor_parallel_size_that_divides_nothing_is_refused(self) -> None:
        """Before any weight is made: the provider is asked as a rank of three would ask it."""
        from megatron.bridge import AutoBridge

        self.family.register()
        provider = AutoBridge.from_hf_pretrained(str(self.family.golden)).to_megatron_provider(load_weights=False)
        provider.tensor_model_parallel_size = 3
        with pytest.raises(BadInput, match=r"tensor parallel size = 3.*would fit"):
            provider.provide()
