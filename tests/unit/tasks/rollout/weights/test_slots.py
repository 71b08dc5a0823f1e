"""A worker's slice of a checkpoint tensor: which elements it holds, and where."""

from types import SimpleNamespace

import pytest
import torch

from tasks.rollout.weights.sharded_sink import _covers
from tasks.rollout.weights.slots import Slice, Slot, slots_of

CASES = {
    "rows": ((6, 5), (2, 5), {"shard": 1}, 0, 2),
    "columns": ((6, 8), (6, 4), {"shard": 1}, 1, 4),
    "middle": ((3, 6, 2), (3, 2, 2), {"shard": 2}, 1, 4),
    "all": ((6, 5), (6, 5), {"shard": 1}, 0, 0),
    "a vector's": ((9,), (3,), {"shard": 2}, 0, 6),
    "a vocabulary's last": ((258, 3), (98, 3), {"shard": 1, "pitch": 160}, 0, 160),
    "of rows none": ((100, 3), (0, 3), {"shard": 1, "pitch": 128}, 0, 100),
}


@pytest.mark.parametrize("case", CASES)
def test_positions_are_found_in_the_slice(case: str) -> None:
    whole, held, place, dim, start = CASES[case]
    tensor = torch.randn(whole)
    part = Slice.of(Slot(torch.zeros(held).view(-1), torch.Size(held), **place), whole)
    assert part is not None and (part.dim, part.start) == (dim, start)
    positions = torch.randperm(tensor.numel())[: tensor.numel() // 2].sort().values
    mine, own = part.own(positions)
    changed = torch.full(whole, torch.nan).view(-1)
    changed[positions] = tensor.view(-1)[positions]
    found = torch.full(held, torch.nan).view(-1)
    found[own] = tensor.view(-1)[positions[mine]]
    assert torch.equal(
        found.nan_to_num(7), tensor_part(changed.view(whole), dim, start, held).reshape(-1).nan_to_num(7)
    )


def tensor_part(tensor: torch.Tensor, dim: int, start: int, held: tuple[int, ...]) -> torch.Tensor:
    return tensor.narrow(dim, start, held[dim])


@pytest.mark.parametrize(
    ("held", "place"),
    [((3, 4), {}), ((4, 8, 1), {}), ((4, 8), {"shard": 2}), ((8, 8), {})],
    ids=["both dimensions", "another rank", "beyond the end", "larger"],
)
def test_what_is_no_slice_is_none(held: tuple[int, ...], place: dict[str, int]) -> None:
    assert Slice.of(Slot(torch.zeros(held).view(-1), torch.Size(held), **place), (6, 8)) is None


def test_slices_are_the_tensor_only_when_nothing_is_missing() -> None:
    assert _covers({(0, 0, 160), (0, 160, 98)}, (258, 3)) and _covers({(1, 0, 4), (1, 4, 4)}, (6, 8))
    assert _covers({(0, 0, 6)}, (6, 8)) and _covers({(0, 0, 1)}, ())
    assert not _covers(set(), (6, 8)) and not _covers(set(), ())
    assert not _covers({(0, 3, 3)}, (6, 8)) and not _covers({(0, 0, 3)}, (6, 8))
    assert not _covers({(0, 0, 3), (1, 3, 5)}, (6, 8)) and not _covers({(0, 0, 3), (0, 2, 4)}, (6, 8))


class Layer(torch.nn.Module):
    """Two experts, as one of vLLM's kernels holds them."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.randn(2, 2 * 3, 4))
        self.w2_weight = torch.nn.Parameter(torch.randn(2, 4, 3))
        parallel = SimpleNamespace(enable_eplb=False, tp_rank=0)
        self.moe_config = SimpleNamespace(intermediate_size_per_partition=3, moe_parallel_config=parallel)
        self.quant_method = SimpleNamespace(
            unquantized_backend=SimpleNamespace(name=backend), moe_kernel=SimpleNamespace(fused_experts=None)
        )
        self._expert_map, self.local_num_experts = None, 2


def test_experts_lie_where_their_kernel_keeps_them_as_they_were_loaded() -> None:
    model = torch.nn.ModuleDict({"experts": Layer("TRITON")})
    slots = slots_of(model)
    assert len(slots) == 2 * 3
    assert torch.equal(slots["experts.1.up_proj.weight"].read(), model["experts"].w13_weight[1, 3:])


@pytest.mark.parametrize("backend", ["FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM"])
def test_experts_that_a_kernel_lays_out_anew_have_no_slots(backend: str) -> None:
    """CUTLASS's has up before gate, TRT-LLM's blocks: vLLM's loader alone knows."""
    assert slots_of(torch.nn.ModuleDict({"experts": Layer(backend)})) == {}
