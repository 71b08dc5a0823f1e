"""A vLLM model in this process as a taker of policies: weights read and replaced in place, all of an update or nothing."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from infra.policy.follow import Prefetch
from tasks.rollout.weights import loader, sparse_update
from tasks.rollout.weights.sparse_update import Update

if TYPE_CHECKING:
    from numpy import ndarray

    from infra.policy.codec.frame import Changes


class ModelSink:
    """The model of one vLLM worker that holds all of it (infra.policy.sink.PolicySink)."""

    version: str | None
    """Policy digest of what it holds; None: the checkpoint's own weights."""
    prefetched: Prefetch | None
    """What is being prepared."""
    loads_whole = False

    def __init__(self, worker: Any, shapes: dict[str, tuple[int, ...]]):
        """`shapes`: of the checkpoint's tensors, by name."""
        self.version: str | None = None
        self.prefetched: Prefetch | None = None
        self.shapes = shapes
        self.wider: dict[str, torch.Tensor] = {}
        slots = loader.find_slots(worker)
        self.slots = slots if all(n in slots and tuple(slots[n].shape) == s for n, s in shapes.items()) else {}
        """Empty when the model keeps some tensor in a layout that only vLLM's loader knows."""
        self._worker = worker

    def words(self, name: str, dtype: torch.dtype) -> "ndarray | None":
        """As PolicySink's; None for a model without slots too."""
        return sparse_update.words_of(self.slots[name], self.wider.get(name), dtype) if name in self.slots else None

    def prepare(self, changes: "Iterable[tuple[str, torch.dtype, Changes]]") -> Update:
        """As PolicySink's."""
        return Update.sparse(self.slots, self.wider, changes)

    def prepare_whole(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Update:
        """As PolicySink's. Any float dtype (cast to the engine's); BadInput names a tensor that does not fit the model."""
        complete = loader.collect(tensors, self.shapes)
        return Update.full(self.slots, complete) if self.slots else Update([], {}, complete)

    def commit(self, update: Update, version: str) -> None:
        """Write in place what is new; when it raises, the old weights are back, bit for bit."""
        if update.loaded is None:
            sparse_update.write(update.patches)
        else:
            loader.load_all_or_nothing(lambda function, args: [function(self._worker, *args)], update.loaded)
        self.wider = update.wider
        self.version = version
