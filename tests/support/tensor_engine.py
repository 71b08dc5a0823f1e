"""A trainer and an engine without a model: the code that publishes and applies is the real one, the weights are tensors."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from infra.policy.codec.frame import Changes
from infra.policy.follow import Prefetch
from infra.policy.mirror import Mirror
from tasks.rollout.weights import loader, sparse_update
from tasks.rollout.weights.slots import Slot


class TensorTrainer:
    """Exports the tensors that it is given: a whole policy, or with `config` (PEFT's) an adapter. `processes`: how many see
    the export, each of which publishes its share."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None, processes: int = 1):
        self.tensors, self.config = tensors, config
        self.become(processes)

    def become(self, processes: int) -> None:
        """Started anew, as so many processes: nothing is known of what was published."""
        self.members = [TensorProcess(self, rank, processes) for rank in range(processes)]

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    def each[T](self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """One after the other, so that what dies dies at the same write each time; the first fault, when all have ended."""
        results, faults = list[T](), list[Exception]()
        for member in self.members:
            try:
                results.append(function(member, *arguments))
            except Exception as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        return results

    def adapter_config(self) -> dict[str, Any] | None:
        return self.config


class TensorProcess:
    """One of a trainer's."""

    def __init__(self, trainer: TensorTrainer, rank: int, processes: int):
        self.trainer, self.rank, self.processes = trainer, rank, processes
        self.committed: Mirror | None = None

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.trainer.export()


class TensorEngine:
    """Holds a policy as the rollout engine does: in slots, in `dtype` (None: each tensor's own), patched in place. An
    adapter's tensors too, for want of a kernel that would hold them."""

    loads_whole = False

    def __init__(self, like: dict[str, torch.Tensor], dtype: torch.dtype | None = None):
        self.version: str | None = None
        self.prefetched: Prefetch | None = None
        self.memory = {name: torch.zeros_like(tensor, dtype=dtype or tensor.dtype) for name, tensor in like.items()}
        self.slots = {name: Slot(tensor.view(-1), tensor.shape) for name, tensor in self.memory.items()}
        self.wider: dict[str, torch.Tensor] = {}
        self.whole = 0
        """How often all tensors came, and not the changes."""

    def words(self, name: str, dtype: torch.dtype) -> Any:
        return sparse_update.words_of(self.slots[name], self.wider.get(name), dtype)

    def prepare(self, changes: Iterable[tuple[str, torch.dtype, Changes]]) -> sparse_update.Update:
        return sparse_update.Update.sparse(self.slots, self.wider, changes)

    def prepare_whole(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> sparse_update.Update:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.memory.items()}
        self.whole += 1
        return sparse_update.Update.full(self.slots, loader.collect(tensors, shapes))

    def prepare_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> sparse_update.Update:
        assert config
        return sparse_update.Update.full(self.slots, tensors.items())

    def commit(self, update: sparse_update.Update, version: str) -> None:
        sparse_update.write(update.patches)
        self.wider = update.wider
        self.version = version
