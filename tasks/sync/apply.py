"""Engine side, inside its process: bring an engine to a policy version, from the store, in place."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

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

    def apply_adapter(self, tensors: "dict[str, torch.Tensor]", config: dict[str, Any], version: str) -> None:
        """Take over an adapter in place of the last one, or keep that and raise."""
        ...


def follow(engine: PolicySink, ref: ArtifactRef) -> None:
    """Bring the engine to the policy version `ref`; a no-op when it is there. Tensors are verified as they are read."""
    what = policy.describe(ref)
    if engine.version == what.policy_digest:
        return
    if what.adapter_config is not None:
        engine.apply_adapter(dict(policy.read(ref)), what.adapter_config, what.policy_digest)
    else:
        engine.apply(policy.read(ref), what.policy_digest)
