"""The CPU engine's adapter of one layer against its formula, y += B (A x)."""

import pytest
import torch

from tasks.rollout.vllm_cpu.lora import StackedAdapter

SIZES = (12, 4, 4)


@pytest.mark.parametrize("rank", [3, 40], ids=["narrow", "wide"])
@pytest.mark.parametrize("kind", ["an A each", "one A", "q only", "q and v, one A"])
def test_slices_get_their_own_product(kind: str, rank: int):
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(rank, 16, generator=generator)
    pairs: list = []
    for index, size in enumerate(SIZES):
        a = torch.randn(rank, 16, generator=generator) if kind == "an A each" else shared
        missing = (kind == "q only" and index) or (kind == "q and v, one A" and index == 1)
        pairs.append(None if missing else (a, torch.randn(size, rank, generator=generator)))
    x, y = torch.randn(5, 16, generator=generator), torch.randn(5, 20, generator=generator)
    parts = [
        torch.zeros(5, size) if p is None else x @ p[0].t() @ p[1].t() for p, size in zip(pairs, SIZES, strict=True)
    ]
    added = torch.cat(parts, dim=1)
    adapter = StackedAdapter(pairs, SIZES)
    result = y.clone()
    adapter.add_to(result, x)
    torch.testing.assert_close(result, y + added, rtol=1e-4, atol=1e-4)
    if "one A" in kind:
        assert len(adapter.a_RI) == rank, "one A is multiplied once"
    uses = torch.tensor([1.0, 0, 1, 0, 1]).unsqueeze(1)
    result = y.clone()
    adapter.add_to(result, x, uses)
    torch.testing.assert_close(result, y + added * uses, rtol=1e-4, atol=1e-4)
    weight = torch.randn(sum(SIZES), 16, generator=generator)
    whole = weight.clone()
    adapter.add_to_weight(whole)
    torch.testing.assert_close(x @ whole.t(), x @ weight.t() + added, rtol=1e-4, atol=1e-4)
