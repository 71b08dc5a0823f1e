"""Engine side, inside its process: bring an engine to a policy version, from the store, in place."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from infra import policy
from infra.artifacts import ArtifactRef

if TYPE_CHECKING:
    import torch


class PolicySink(Protocol):
    """What applying needs of a rollout engine."""

    version: str | None

    def apply(self, tensors: "Iterable[tuple[str, torch.Tensor]]", version: str) -> None:
        """Take over the tensors in place, or keep the old ones and raise."""
        ...


def follow(engine: PolicySink, ref: ArtifactRef) -> None:
    """Bring the engine to the policy version `ref`; a no-op when it is there. Tensors are verified as they are read."""
    digest = policy.describe(ref).policy_digest
    if engine.version != digest:
        engine.apply(policy.read(ref), digest)
