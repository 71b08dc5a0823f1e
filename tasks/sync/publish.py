"""Trainer side, inside its process: the policy after an update becomes a version in the store."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from infra import policy
from infra.artifacts import ArtifactRef
from infra.run import Stage
from infra.store import Store

if TYPE_CHECKING:
    import torch


class PolicySource(Protocol):
    """What publishing needs of a trainer."""

    def export(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """(Hugging Face name, tensor) of the policy; of its adapter, when that is all that is trained."""
        ...

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's adapter_config.json of what `export` gives; None when that is the whole policy."""
        ...


def publish(trainer: PolicySource, stage: Stage) -> ArtifactRef:
    """Commit the trainer's policy as version `stage.step`: full, or an adapter when the trainer trains one."""
    if done := stage.committed():
        return done
    return policy.write_full(
        Store.at(stage.store),
        stage.key,
        trainer.export(),
        version=stage.step,
        step=stage.step,
        inputs=stage.inputs,
        config_hash=stage.settings,
        adapter_config=trainer.adapter_config(),
    )
