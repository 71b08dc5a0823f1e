"""Trainer side, inside its process: the policy after an update becomes a version in the store."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from infra import policy
from infra.artifacts import ArtifactRef
from infra.run import Stage

if TYPE_CHECKING:
    import torch


class PolicySource(Protocol):
    """What publishing needs of a trainer."""

    def export(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """(Hugging Face name, tensor) of the policy."""
        ...


def publish(trainer: PolicySource, stage: Stage) -> ArtifactRef:
    """Commit the trainer's policy as full version `stage.step`."""
    if done := stage.committed():
        return done
    started = time.perf_counter()
    return policy.write_full(stage, trainer.export(), version=stage.step, started=started)
