"""vLLM's fused experts, interpreted, and its choice of experts, against Beam's golden values and its definition."""

import pytest

from tests.gpu_env import interpreted  # first

import torch  # isort: skip
import triton.language as tl  # isort: skip
from safetensors.torch import load_file  # isort: skip
from vllm.model_executor.layers.fused_moe import fused_moe  # isort: skip
from vllm.model_executor.layers.fused_moe.router import grouped_topk_router  # isort: skip

from tests.integration.beam.family import BEAM  # isort: skip

DTYPE = getattr(torch, interpreted.DTYPE)
BLOCKS = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "SPLIT_K": 1}


@pytest.mark.parametrize("routed_weight", [False, True], ids=["up", "down"])
def test_the_experts_kernel_multiplies_each_token_by_its_experts(routed_weight: bool):
    torch.manual_seed(0)
    tokens, topk, count, inputs, outputs = 5, 2, 40, 48, 64
    x_TI = torch.randn(tokens, inputs).to(DTYPE)
    w_EOI = torch.randn(count, outputs, inputs).to(DTYPE)
    ids = torch.stack([torch.randperm(count)[:topk] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, topk)
    sorted_ids, expert_ids, padded = fused_moe._prepare_expert_assignment(ids, BLOCKS, tokens, topk, count, None)
    assert sorted_ids is None, "few tokens: no sorting, whose kernel is CUDA's"
    out = torch.zeros(tokens, topk, outputs, dtype=DTYPE)
    fused_moe.invoke_fused_moe_triton_kernel(
        x_TI,
        w_EOI,
        out,
        None,
        None,
        weights,
        sorted_ids,
        expert_ids,
        padded,
        routed_weight,
        topk,
        BLOCKS,
        tl.float16,
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
    )
    want = torch.einsum("ti,tkoi->tko", x_TI.float(), w_EOI.float()[ids.long()])
    want = want * weights[..., None] if routed_weight else want
    assert (out.float() - want).abs().max() <= 2e-3 * want.abs().max()


@torch.no_grad()
def test_the_experts_that_vllm_chooses_on_a_gpu_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch):
    """By its PyTorch form; the fused one is CUDA's own."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("VLLM_USE_FUSED_MOE_GROUPED_TOPK", "0")
    golden = load_file(BEAM.golden / "golden.safetensors")
    model = AutoModelForCausalLM.from_pretrained(BEAM.golden, dtype=torch.float32).eval()
    config, chosen = model.config, []

    def choose(module: torch.nn.Module, inputs: tuple, outputs: tuple) -> None:
        logits = outputs[0]
        groups, kept = (config.n_group, config.topk_group) if config.grouped_routing else (1, 1)
        weights, ids = grouped_topk_router.grouped_topk(
            inputs[0],
            logits,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            groups,
            kept,
            "sigmoid",
            config.routed_scaling_factor,
            module.e_score_correction_bias,
        )
        order, theirs = ids.argsort(-1), outputs[2].argsort(-1)
        torch.testing.assert_close(weights.gather(1, order), outputs[1].gather(1, theirs), rtol=1e-6, atol=1e-7)
        chosen.append(ids.gather(1, order))

    for module in model.modules():
        if type(module).__name__ == BEAM.router:
            module.register_forward_hook(choose)
    model(golden["input_ids"])
    batch, length = golden["input_ids"].shape
    routes = torch.stack(chosen, 1).view(batch, length, len(chosen), -1)
    assert torch.equal(routes.int(), golden["routes"].sort(-1).values.int())
