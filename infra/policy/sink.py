"""What takes over policies: the protocols that every sink of weights satisfies."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from numpy import ndarray

    from infra.policy.codec.frame import Changes


class PolicySink[U](Protocol):
    """Weights that are read and replaced in place, by updates of kind U. `prepare*` change nothing, and run beside the
    engine's work."""

    loads_whole: bool
    """Whether `commit` costs the whole policy, however little changed: it goes over several versions at once."""

    def words(self, name: str, dtype: "torch.dtype") -> "ndarray | None":
        """A copy of a tensor's bits (infra/policy/codec/layout.py), of the policy's dtype; None if it cannot tell."""
        ...

    def prepare(self, changes: "Iterable[tuple[str, torch.dtype, Changes]]") -> U:
        """What `commit` will write to change single elements."""
        ...

    def prepare_whole(self, tensors: "Iterable[tuple[str, torch.Tensor]]") -> U:
        """What `commit` will write to hold these tensors, which are all."""
        ...

    def commit(self, update: U, version: str) -> None:
        """Pause, write in place, resume; or keep the old weights and raise."""
        ...


class FollowingSink[U](PolicySink[U], Protocol):
    """A sink that is brought from version to version."""

    version: str | None
    """Policy digest of what it holds; None when that is not known."""
    prefetched: Any
    """What is being prepared (`infra.policy.follow.Prefetch`), None at first."""


@runtime_checkable
class AdapterSink(Protocol):
    """A sink that serves adapters besides."""

    def prepare_adapter(self, tensors: "dict[str, torch.Tensor]", config: dict[str, Any]) -> Any:
        """What `commit` will write to serve an adapter in place of the last one: PEFT's names, and its
        adapter_config.json."""
        ...
