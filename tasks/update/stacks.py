"""Adapters of experts in checkpoints: alike on a GPU and on a CPU.

Grouped experts (a GPU's) have one adapter, A [experts, rank, in] and B [experts, out, rank]; experts that are modules of
their own (a CPU's) have one each. In a checkpoint every expert has its own part by the name of the latter, so that what one
has written loads in the other.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_ADAPTER = re.compile(r"(?<=\.experts\.)(?=linear_fc[12]\.adapter\.)")

Stacks = Mapping[str, list[str]]
"""Of each stack of adapters, by its parameter's name: the name of every expert's part."""


def stacks_of(parameters: Mapping[str, Tensor]) -> Stacks:
    """Those among this process's parameters, whose experts count from 0 in it."""
    return {
        name: [_ADAPTER.sub(f"local_experts.{expert}.", name) for expert in range(len(parameter))]
        for name, parameter in parameters.items()
        if parameter.dim() == 3 and _ADAPTER.search(name)
    }


def by_expert(state: Mapping[str, Tensor], stacks: Stacks) -> dict[str, Tensor]:
    """An optimizer's state ("master.NAME", "step.NAME", ...) with the parts of each stack: views, and of a scalar the same
    one for every expert, each its own tensor."""
    parts: dict[str, Tensor] = {}
    for key, tensor in state.items():
        kind, _, name = key.partition(".")
        if name not in stacks:
            parts[key] = tensor
            continue
        for expert, own in enumerate(stacks[name]):
            parts[f"{kind}.{own}"] = tensor[expert] if tensor.dim() else tensor.clone()
    return parts


def as_stacks(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], stacks: Stacks) -> dict[str, Tensor]:
    """Undoes `by_expert`: `tensors`, and the stacks that the state `own` has. KeyError where a part is missing."""
    whole = dict(tensors)
    for key, tensor in own.items():
        kind, _, name = key.partition(".")
        if name in stacks:
            parts = [tensors[f"{kind}.{part}"] for part in stacks[name]]
            whole[key] = torch.stack(parts) if tensor.dim() else parts[0]
    return whole
