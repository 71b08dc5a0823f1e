"""Where each checkpoint tensor lies in a vLLM model's memory, so that single elements can be read and replaced."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Slot:
    """One checkpoint tensor inside a parameter: consecutive rows, perhaps padded, perhaps permuted by a kernel."""

    memory: torch.Tensor
    """The parameter (of one expert), flat, a view of what the kernels read."""
    shape: torch.Size
    """The checkpoint tensor's."""
    offset: int = 0
    """Entry of the parameter, in plain order, at which the tensor begins."""
    stride: int | None = None
    """Entries from row to row where rows are padded; None: they are not."""
    packed: torch.Tensor | None = None
    """int64: entry i of the parameter in plain order lies at memory[packed[i]]; None: at memory[i]."""

    def index(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [n]: places in `memory` of the flat checkpoint tensor's `positions` (int64 [n])."""
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


def slots_of(model: Any) -> dict[str, Slot]:
    """{checkpoint name: Slot} of a whole model in one worker, undoing vLLM's stacking (qkv, gate and up, experts).

    A parameter that is not one contiguous block has none; nor does this know of quantized layers' layouts.
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
            offset = 0
            for piece, rows in zip(stacked[leaf], module.output_sizes, strict=True):
                shape = torch.Size((rows, *data.shape[1:]))
                slots[f"{parent}.{piece}.{kind}"] = Slot(data.view(-1), shape, offset)
                offset += shape.numel()
        else:
            shape = data[: getattr(module, "org_vocab_size", None)].shape if data.dim() else data.shape
            slots[name] = Slot(data.view(-1), shape)
    for name, module in experts(model):
        slots |= _expert_slots(name.removesuffix(".routed_experts"), module)
    return slots


def experts(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """(name, module) of the modules that hold stacked experts: w13_weight [E, 2I, H] and w2_weight [E, H, I]."""
    return [(name, module) for name, module in model.named_modules() if "w13_weight" in module._parameters]


def _expert_slots(path: str, module: Any) -> dict[str, Slot]:
    size = module.moe_config.intermediate_size_per_partition
    w13, w2 = module.w13_weight.data, module.w2_weight.data
    if not (w13.is_contiguous() and w2.is_contiguous()):
        return {}
    packed13, packed2 = _packed(module, w13), _packed(module, w2)
    half, hidden, padded = w13.shape[1] // 2, w13.shape[2], w2.shape[2]
    slots: dict[str, Slot] = {}
    for expert in range(w13.shape[0]):
        name, up, down = f"{path}.{expert}", w13[expert].view(-1), w2[expert].view(-1)
        rows = torch.Size((size, hidden))
        slots[f"{name}.gate_proj.weight"] = Slot(up, rows, packed=packed13)
        slots[f"{name}.up_proj.weight"] = Slot(up, rows, half * hidden, packed=packed13)
        columns = torch.Size((w2.shape[1], size))
        slots[f"{name}.down_proj.weight"] = Slot(down, columns, stride=padded, packed=packed2)
    return slots


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
