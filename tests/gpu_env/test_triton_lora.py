"""vLLM's kernels for adapters, interpreted, against the adapter's definition and against our CPU layers."""

import itertools

import pytest

from tests.gpu_env import interpreted  # first

import torch  # isort: skip
from torch import Tensor  # isort: skip
from vllm.lora.ops.triton_ops import fused_moe_lora_op as experts  # isort: skip
from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand  # isort: skip
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta  # isort: skip
from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink  # isort: skip

from tasks.rollout.vllm_cpu.lora import StackedAdapter  # isort: skip

DTYPE = getattr(torch, interpreted.DTYPE)
SCALE = 0.5
TOLERANCE = 2e-3
"""Of the largest value: two roundings to fp16."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).to(DTYPE)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.float() - theirs.float()).abs().max() <= TOLERANCE * theirs.float().abs().max()


@pytest.mark.parametrize(("rank", "sizes"), [(8, (32, 16, 16)), (16, (48,)), (4, (64, 64))])
def test_shrink_and_expand_are_our_cpu_layer(rank: int, sizes: tuple[int, ...]):
    torch.manual_seed(rank)
    tokens, width = 7, 48
    x_TI, without = normal(tokens, width), 3
    a, b = [normal(1, rank, width) for _ in sizes], [normal(1, size, rank) for size in sizes]
    mapping = torch.zeros(tokens, dtype=torch.int32)
    mapping[without] = -1  # a token of the base model
    meta = LoRAKernelMeta.make(1, tokens, "cpu")
    meta.prepare_tensors(mapping)
    arguments = meta.meta_args(tokens, specialize_active_lora=True)
    low, y_TO = torch.empty(len(sizes), tokens, rank), normal(tokens, sum(sizes))
    ours = y_TO.float()
    _lora_shrink(x_TI, a, low, *arguments, SCALE)
    _lora_expand(low, b, y_TO, *arguments, 0, True)

    layer = StackedAdapter([(A[0].float(), SCALE * B[0].float()) for A, B in zip(a, b, strict=True)], sizes)
    layer.add_to(ours, x_TI.float(), (mapping >= 0).float().unsqueeze(1))
    close(y_TO, ours)


def added_by_experts(x_TKI: Tensor, a: list[Tensor], b: list[Tensor], ids: Tensor, weights: Tensor | None) -> Tensor:
    """[T, K experts a token, slices * O]: B (A x) of each token's experts, times its routing weight."""
    out = torch.zeros(*ids.shape, sum(one.shape[2] for one in b))
    for token, slot in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        expert = int(ids[token, slot])
        parts = [
            B[0, expert].float() @ (A[0, expert].float() @ x_TKI[token, slot].float())
            for A, B in zip(a, b, strict=True)
        ]
        out[token, slot] = torch.cat(parts) * (1.0 if weights is None else weights[token, slot])
    return out


@pytest.mark.parametrize("routed_weight", [False, True], ids=["up", "down"])
@pytest.mark.parametrize(("tokens", "rank"), [(5, 8), (3, 16)])
def test_fused_expert_adapters_are_each_experts_own(tokens: int, rank: int, routed_weight: bool):
    """The path of small batches: of decoding."""
    torch.manual_seed(tokens)
    count, topk, width, size, slices = 8, 2, 32, 32, 1 if routed_weight else 2
    # Before the down projection each (token, expert) pair has a row of its own.
    x = normal(tokens * topk, width) if routed_weight else normal(tokens, width)
    x_TKI = x.view(tokens, -1, width).expand(tokens, topk, width)
    a, b = [normal(1, count, rank, width) for _ in range(slices)], [normal(1, count, size, rank) for _ in range(slices)]
    ids = torch.stack([torch.randperm(count)[:topk] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, topk)
    before = normal(tokens, topk, slices * size)
    out = before.clone()
    assert tokens * topk * rank <= 1024, "vLLM's condition for this kernel"
    experts._run_fused_moe_lora_small_batch(
        out,
        x,
        a,
        b,
        weights,
        ids.flatten(),
        torch.zeros(tokens, dtype=torch.int32),
        topk,
        torch.ones(2, dtype=torch.int32),
        routed_weight,
    )
    close(out, before.float() + added_by_experts(x_TKI, a, b, ids, weights if routed_weight else None))
