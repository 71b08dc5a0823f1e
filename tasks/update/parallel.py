"""What the processes of one trainer have to add up: gradients, their norm, the loss's sums.

Megatron's own finalizer does it for its distributed data parallel; here gradients are those of the fp32 masters. All
of it does nothing where the trainer is one process.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.update.optimizer import MasterAdamW, Share
from tasks.update.step_loss import LARGEST, LossSums


class Ranks:
    """This process's place among the trainer's, and the sums over them. Every process calls them in the same order."""

    def __init__(self, parameters: Mapping[str, Any]):
        self.parameters = parameters
        self.rank, self.number = dist.get_rank(), dist.get_world_size()
        self.alone = self.number == 1

    def sum_gradients(self, optimizer: MasterAdamW) -> float:
        """Make every gradient whole, on each process that holds its parameter; the global L2 norm, equal on all.

        Data-parallel processes have other tokens (so has, of an expert, each expert-data-parallel one). Tensor-parallel
        ones have other heads, and with sequence parallelism other tokens, where a parameter is on all of them.
        """
        if self.alone:
            return optimizer.grad_norm()
        from megatron.core import parallel_state

        gradients = optimizer.gradients()
        split = [name for name in gradients if self._is_summed_over_tensor(name)]
        dense = [name for name in gradients if self._is_dense(name)]
        experts = [name for name in gradients if not self._is_dense(name)]
        _sum([gradients[name] for name in split], parallel_state.get_tensor_model_parallel_group())
        _sum([gradients[name] for name in dense], parallel_state.get_data_parallel_group())
        _sum([gradients[name] for name in experts], parallel_state.get_expert_data_parallel_group())
        counted = [gradients[name] for name in gradients if self._counts(name)]
        squares = sum((gradient.double().square().sum() for gradient in counted), torch.zeros((), dtype=torch.double))
        squares = squares.cpu()  # as on a process that counts none: all must sum over one backend
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def shares(self) -> dict[str, Share]:
        """Of each parameter that several processes hold alike: the one that keeps its optimizer state, by size in turn."""
        if self.alone:
            return {}
        from megatron.core import parallel_state

        groups = {
            True: parallel_state.get_data_parallel_group(),
            False: parallel_state.get_expert_data_parallel_group(),
        }
        members = {dense: dist.get_process_group_ranks(group) for dense, group in groups.items()}
        # Counted apart: of other processes' experts, those that share a dense parameter do not know alike.
        load = {dense: dict.fromkeys(ranks, 0) for dense, ranks in members.items()}
        shares: dict[str, Share] = {}
        for name, parameter in sorted(self.parameters.items(), key=lambda item: (-item[1].numel(), item[0])):
            dense = self._is_dense(name)
            if len(members[dense]) > 1:
                owner = min(members[dense], key=lambda rank: (load[dense][rank], rank))
                load[dense][owner] += parameter.numel()
                shares[name] = Share(owner, groups[dense])
        return shares

    def total(self, sums: LossSums) -> LossSums:
        """The sums of all processes' tokens; a token counts once, where the last pipeline stage has computed it."""
        if self.alone:
            return sums
        mine = self._counts_tokens()
        values = torch.tensor([float(getattr(sums, f.name)) * mine for f in fields(sums)], dtype=torch.double)
        largest = values.clone()
        dist.all_reduce(values)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        total: dict[str, Any] = {
            f.name: float(largest[i] if f.name in LARGEST else values[i]) for i, f in enumerate(fields(sums))
        }
        total |= {"loss": torch.tensor(total["loss"]), "tokens": round(total["tokens"])}
        return LossSums(**total)

    def union(self, results: dict[int, list[float]]) -> dict[int, list[float]]:
        """All processes' entries."""
        if self.alone:
            return results
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, results)
        return {row: values for part in everyone for row, values in part.items()}

    def _counts_tokens(self) -> bool:
        from megatron.core import parallel_state

        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return last and parallel_state.get_tensor_model_parallel_rank() == 0

    def _is_dense(self, name: str) -> bool:
        return getattr(self.parameters[name], "allreduce", True)

    def _is_summed_over_tensor(self, name: str) -> bool:
        per_head = "q_layernorm" in name or "k_layernorm" in name
        return per_head or getattr(self.parameters[name], "sequence_parallel", False)

    def _counts(self, name: str) -> bool:
        """Whether this process is the one that counts the parameter in the norm (of those that hold equal copies)."""
        from megatron.core import parallel_state

        is_part = getattr(self.parameters[name], "tensor_model_parallel", False)
        if self._is_dense(name):
            copy = parallel_state.get_data_parallel_rank()
            return copy == 0 and (is_part or parallel_state.get_tensor_model_parallel_rank() == 0)
        copy = parallel_state.get_expert_data_parallel_rank()
        return copy == 0 and (is_part or parallel_state.get_expert_tensor_parallel_rank() == 0)


def _sum(tensors: list[Tensor], group: Any) -> None:
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch._utils._flatten_dense_tensors(tensors)
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, torch._utils._unflatten_dense_tensors(flat, tensors), strict=True):
        tensor.copy_(total)
