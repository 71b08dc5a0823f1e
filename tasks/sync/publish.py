"""Trainer side, inside its process: the policy after an update becomes a version in the store."""

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from infra import policy, policy_read, policy_write
from infra.artifacts import ArtifactRef
from infra.run import Stage
from infra.store import Store
from tasks.sync.config import SyncConfig

if TYPE_CHECKING:
    import torch

    from infra.mirror import Mirror


class PolicySource(Protocol):
    """What publishing needs of a trainer."""

    published: "Mirror | None"
    """The version that was published last, kept here from one call to the next; None at first."""

    def export(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """(Hugging Face name, tensor) of the policy; of its adapter, when that is all that is trained."""
        ...

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's adapter_config.json of what `export` gives; None when that is the whole policy."""
        ...


def publish(trainer: PolicySource, stage: Stage, config: SyncConfig, parent: ArtifactRef | None) -> ArtifactRef:
    """Commit the trainer's policy as version `stage.step`: what changed since `parent`, or, without one, all of it.
    An adapter is always all of it.

    Every `config.anchor_every`-th version holds all of it besides.
    """
    if done := stage.committed():
        return done
    store = Store.at(stage.store)
    seconds = {"engine_s": 0.0}
    weights = _timed(trainer.export(), seconds)
    options: dict[str, Any] = {
        "provenance": seconds,
        "version": stage.step,
        "step": stage.step,
        "inputs": stage.inputs,
        "config_hash": stage.settings,
    }
    adapter = trainer.adapter_config()
    if parent is None or config.form == "full" or adapter is not None:
        base = policy.describe(parent).policy_digest if parent else None
        ref = policy_write.write_full(
            store, stage.key, weights, base=base, parent=parent, adapter_config=adapter, **options
        )
        if config.form != "full" and adapter is None:
            # The next version will need the codec: compile it while the engines sample.
            threading.Thread(target=_warm_up, args=(ref,), name="codec", daemon=True).start()
        return ref
    mirror, trainer.published = trainer.published, None  # a fault below leaves it between two versions
    if mirror is None or mirror.ref != parent:
        mirror = policy_read.mirror_of(parent)
    anchor = stage.step % config.anchor_every == 0
    ref = policy_write.write_delta(store, stage.key, weights, mirror, anchor=anchor, **options)
    trainer.published = mirror
    return ref


def _timed(
    tensors: "Iterator[tuple[str, torch.Tensor]]", seconds: dict[str, float]
) -> "Iterator[tuple[str, torch.Tensor]]":
    """`tensors`; adds to seconds["engine_s"] what the trainer takes to give them."""
    while True:
        started = time.perf_counter()
        found = next(tensors, None)
        seconds["engine_s"] += time.perf_counter() - started
        if found is None:
            return
        yield found


def _warm_up(ref: ArtifactRef) -> None:
    from infra.codec import frame
    from infra.codec.layout import layout_of

    for layout in {layout_of(policy.dtype_of(info)) for info in policy.describe(ref).tensors.values()}:
        frame.warm_up(layout)
