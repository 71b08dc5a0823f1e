"""Engines that take only whole policies follow by what changed all the same: the version is kept in a scratch file.

A quantised model holds other numbers than a version's, and some kernels lay tensors out in ways of their own: neither can
say what a change is relative to, and vLLM's loader wants all tensors. So changes are decoded against a mirror (a mapped
file), and the loader is given the whole from there: a sync reads the changes from the store, not the chain since the last
anchor, and loads once, however many versions it goes over.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from infra.policy.codec.layout import words
from infra.policy.mirror import Mirror

if TYPE_CHECKING:
    from numpy import ndarray

    from infra.policy.codec.frame import Changes
    from tasks.rollout.weights.model_sink import ModelSink
    from tasks.rollout.weights.sharded_sink import ShardedSink

type Tensors = Iterable[tuple[str, torch.Tensor]]


@dataclass
class MirroredUpdate:
    """All tensors, ready to be loaded, and what becomes of the mirror then."""

    whole: Any
    """Of the sink that loads."""
    changes: "list[tuple[str, Changes]]"
    """Of the mirror's version;"""
    mirror: Mirror | None = None
    """or a new mirror."""


class MirroredSink:
    """A sink that loads whole policies, with a mirror of the last (infra.policy.sink.PolicySink)."""

    loads_whole = True

    def __init__(self, sink: "ModelSink | ShardedSink", numbers: Callable[[Tensors], Tensors]):
        """`numbers`: what the sink loads of a version's tensors."""
        self.mirror: Mirror | None = None
        """The version that the engine holds; None when it is not known."""
        self._sink, self._numbers = sink, numbers

    def words(self, name: str, dtype: torch.dtype) -> "ndarray | None":
        """As PolicySink's."""
        if self.mirror is None or name not in self.mirror or self.mirror.tensor(name).dtype != dtype:
            return None
        return self.mirror.words(name).copy()

    def prepare(self, changes: "Iterable[tuple[str, torch.dtype, Changes]]") -> MirroredUpdate:
        """As PolicySink's."""
        mirror, found = self.mirror, {name: change for name, _, change in changes}
        assert mirror is not None, "changes are relative to its words"

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name in mirror.names:
                tensor = mirror.tensor(name)
                if name in found:
                    tensor = tensor.clone()
                    words(tensor)[found[name].positions] = found[name].values
                yield name, tensor

        return MirroredUpdate(self._sink.prepare_whole(self._numbers(tensors())), list(found.items()))

    def prepare_whole(self, tensors: Tensors) -> MirroredUpdate:
        """As PolicySink's. BadInput names a tensor that does not fit the model."""
        complete = list(tensors)
        whole = self._sink.prepare_whole(self._numbers(complete))
        mirror = Mirror({name: (tensor.dtype, list(tensor.shape)) for name, tensor in complete})
        for name, tensor in complete:
            mirror.words(name)[:] = words(tensor)
        return MirroredUpdate(whole, [], mirror)

    def commit(self, update: MirroredUpdate, version: str) -> None:
        """Load it in place; when it raises, the old weights are back, bit for bit."""
        self._sink.commit(update.whole, version)
        mirror, self.mirror = update.mirror or self.mirror, None
        assert mirror is not None
        for name, change in update.changes:
            mirror.words(name)[change.positions] = change.values
        self.mirror = mirror
