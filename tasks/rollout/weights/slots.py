"""Where each checkpoint tensor lies in a vLLM model's memory, so that single elements can be read and replaced."""

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Slot:
    """One checkpoint tensor, or a worker's slice of it, inside a parameter: consecutive rows, perhaps padded, perhaps
    permuted by a kernel."""

    memory: torch.Tensor
    """The parameter (of one expert), flat, a view of what the kernels read."""
    shape: torch.Size
    """The checkpoint tensor's, or the slice's."""
    offset: int = 0
    """Entry of the parameter, in plain order, at which the tensor begins."""
    stride: int | None = None
    """Entries from row to row where rows are padded; None: they are not."""
    packed: torch.Tensor | None = None
    """int64: entry i of the parameter in plain order lies at memory[packed[i]]; None: at memory[i]."""
    shard: int = 0
    """Which slice this is, should the worker hold one: 0, 1, ... along the dimension that is split."""
    pitch: int | None = None
    """Entries from slice to slice; None: as many as a slice has (the last one of a vocabulary may have fewer)."""

    def index(self, positions: torch.Tensor) -> torch.Tensor:
        """[n]: places in `memory` of the flat checkpoint tensor's `positions` (int32 or int64 [n]); these, or int64."""
        if self.stride is None and not self.offset and self.packed is None:
            return positions
        positions = positions.long()
        if self.stride is not None:
            columns = self.shape[-1]
            positions = positions.div(columns, rounding_mode="floor") * self.stride + positions % columns
        plain = positions + self.offset if self.offset else positions
        return plain if self.packed is None else self.packed[plain]

    def read(self) -> torch.Tensor:
        """The tensor in the engine's dtype; a view unless a kernel has permuted it."""
        if self.packed is not None:
            return self.memory[self.index(torch.arange(self.shape.numel()))].view(self.shape)
        if self.stride is not None:
            start = self.memory.storage_offset() + self.offset
            return self.memory.as_strided(self.shape, (self.stride, 1), start)
        return self.memory[self.offset : self.offset + self.shape.numel()].view(self.shape)


@dataclass
class Slice:
    """What a worker holds of a checkpoint tensor: some consecutive entries of one dimension, or all."""

    slot: Slot
    whole: tuple[int, ...]
    """The checkpoint tensor's shape."""
    dim: int
    """The dimension that is split."""
    start: int
    """Its first entry that is held; `slot.shape[dim]` are."""

    @classmethod
    def of(cls, slot: Slot, whole: tuple[int, ...]) -> "Slice | None":
        """None when the slot's shape is no slice of `whole` along one dimension."""
        if len(slot.shape) != len(whole):
            return None
        split = [dim for dim, (held, of) in enumerate(zip(slot.shape, whole, strict=True)) if held != of]
        if not split:
            return cls(slot, whole, 0, 0)
        dim, held = split[0], slot.shape[split[0]]
        start = min(slot.shard * (slot.pitch or held), whole[dim])
        return cls(slot, whole, dim, start) if len(split) == 1 and start + held <= whole[dim] else None

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a whole `tensor` that is held; a view."""
        return tensor.narrow(self.dim, self.start, self.slot.shape[self.dim]) if self.whole else tensor

    def own(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [n] in the flat whole tensor. Returns (bool [n]: which are held, int64: those in the flat slice)."""
        if tuple(self.slot.shape) == self.whole:
            return torch.ones(len(positions), dtype=torch.bool), positions
        inner, size, held = math.prod(self.whole[self.dim + 1 :]), self.whole[self.dim], self.slot.shape[self.dim]
        row = positions.div(inner, rounding_mode="floor")
        entry = row % size - self.start
        mine = (entry >= 0) & (entry < held)
        outer = row[mine].div(size, rounding_mode="floor")
        return mine, (outer * held + entry[mine]) * inner + positions[mine] % inner


def slots_of(model: Any, rank: int = 0) -> dict[str, Slot]:
    """{checkpoint name: Slot} of what a worker holds, undoing vLLM's stacking (qkv, gate and up, experts).

    `rank`: the worker's among those that layers are split over (tensor parallelism). A parameter that is not one
    contiguous block has no slot; nor does this know of quantized layers' layouts.
    """
    slots: dict[str, Slot] = {}
    stacked = getattr(model, "packed_modules_mapping", {}) | {"gate_up_proj": ["gate_proj", "up_proj"]}
    held = {name for name, _ in experts(model)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, kind = name.rpartition(".")
        if path in held or not parameter.data.is_contiguous():
            continue
        parent, _, leaf = path.rpartition(".")
        module, data = model.get_submodule(path), parameter.data
        if leaf in stacked and hasattr(module, "output_sizes"):
            offset, replicas = 0, getattr(module, "num_kv_head_replicas", 1)
            for number, (piece, rows) in enumerate(zip(stacked[leaf], module.output_partition_sizes, strict=True)):
                shape = torch.Size((rows, *data.shape[1:]))
                shard = rank // replicas if number in (1, 2) else rank  # ranks may share a head of k and v
                slots[f"{parent}.{piece}.{kind}"] = Slot(data.view(-1), shape, offset, shard=shard)
                offset += shape.numel()
        elif hasattr(module, "shard_indices"):
            rows = data[: module.shard_indices.num_org_elements]
            slots[name] = Slot(data.view(-1), rows.shape, shard=rank, pitch=module.num_embeddings_per_partition)
        else:
            slots[name] = Slot(data.view(-1), data.shape, shard=rank)
    for name, module in experts(model):
        slots |= _expert_slots(name.removesuffix(".routed_experts"), module)
    return slots


def experts(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """(name, module) of the modules that hold stacked experts: w13_weight [E, 2I, H] and w2_weight [E, H, I]."""
    return [(name, module) for name, module in model.named_modules() if "w13_weight" in module._parameters]


_PLAIN_BACKENDS = ("TRITON", "BATCHED_TRITON", "CPU")
"""vLLM's kernels that keep experts as they are loaded, or as `_packed` knows. FlashInfer's on GPUs do not: CUTLASS's has up
before gate, TRT-LLM's moves and pads blocks."""


def _expert_slots(path: str, module: Any) -> dict[str, Slot]:
    backend = getattr(module.quant_method, "unquantized_backend", None)
    if backend is not None and backend.name not in _PLAIN_BACKENDS:
        return {}
    size, parallel = module.moe_config.intermediate_size_per_partition, module.moe_config.moe_parallel_config
    numbers = _expert_numbers(module)
    w13, w2 = module.w13_weight.data, module.w2_weight.data
    if numbers is None or not (w13.is_contiguous() and w2.is_contiguous()):
        return {}
    packed13, packed2 = _packed(module, w13), _packed(module, w2)
    half, hidden, padded = w13.shape[1] // 2, w13.shape[2], w2.shape[2]
    slots: dict[str, Slot] = {}
    for place, expert in enumerate(numbers):
        name, up, down, shard = f"{path}.{expert}", w13[place].view(-1), w2[place].view(-1), parallel.tp_rank
        rows = torch.Size((size, hidden))
        slots[f"{name}.gate_proj.weight"] = Slot(up, rows, packed=packed13, shard=shard)
        slots[f"{name}.up_proj.weight"] = Slot(up, rows, half * hidden, packed=packed13, shard=shard)
        columns = torch.Size((w2.shape[1], size))
        slots[f"{name}.down_proj.weight"] = Slot(down, columns, stride=padded, packed=packed2, shard=shard)
    return slots


def _expert_numbers(module: Any) -> list[int] | None:
    """The checkpoint's numbers of the experts that the worker holds, in their order there; None where vLLM moves them."""
    if module.moe_config.moe_parallel_config.enable_eplb:
        return None
    if module._expert_map is None:
        return list(range(module.local_num_experts))
    held = (module._expert_map >= 0).nonzero().view(-1).tolist()
    return sorted(held, key=module._expert_map.tolist().__getitem__)


def _packed(module: Any, weight: torch.Tensor) -> torch.Tensor | None:
    """Where vLLM's CPU kernel keeps the entries of an expert's parameter; None where it keeps them in plain order."""
    kernel = module.quant_method.moe_kernel.fused_experts
    if not getattr(kernel, "isa", None):
        return None
    order = _packing_order(weight[:1], kernel.isa)
    packed = torch.empty_like(order)
    packed[order] = torch.arange(len(order))
    return packed


def _packing_order(like: torch.Tensor, isa: str) -> torch.Tensor:
    """int64 [n]: entry j of a packed expert is entry order[j] of the plain one. Found by packing the indices' digits, each
    small enough to be exact in bfloat16."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    index = torch.arange(like.numel())
    order = torch.zeros_like(index)
    for shift in range(0, 32, 8):
        digits = ((index >> shift) & 255).to(like.dtype).view(like.shape)
        order += cpu_prepack_moe_weight(digits, isa).flatten().long() << shift
    return order
