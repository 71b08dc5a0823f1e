"""Trainer side, inside its processes: the policy after an update becomes a version in the store.

Every process of a trainer sees the whole export go by; each diffs, codes and uploads its share, and the first one commits.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from infra.policy import reader, writer
from infra.policy.version import describe, dtype_of
from infra.policy.writer import Part, Share
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef
from infra.storage.store import Store
from tasks.sync.config import SyncConfig

if TYPE_CHECKING:
    import torch

    from infra.policy.mirror import Mirror


class PolicyProcess(Protocol):
    """What a commit needs of one of a trainer's processes."""

    rank: int
    processes: int
    committed: "Mirror | None"
    """Its share of the version that was committed last, kept here from one call to the next; None at first."""

    def export(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """(Hugging Face name, tensor) of the policy; of its adapter, when that is all that is trained. To be read to its
        end: all processes take part in each tensor."""
        ...


class PolicySource(Protocol):
    """What a commit needs of a trainer."""

    def each[T](self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """`function(process, *arguments)` in all its processes at once; what each returns, by rank. One's fault is raised
        when all have ended."""
        ...

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's adapter_config.json of what is exported; None when that is the whole policy."""
        ...


@dataclass
class _Work:
    """What a process is to write."""

    store: str
    key: str
    parent: ArtifactRef | None
    """Of a delta."""
    is_adapter: bool
    is_anchor: bool
    codec_follows: bool
    """Whether the next version will need the codec."""


def commit(trainer: PolicySource, stage: Stage, config: SyncConfig, parent: ArtifactRef | None) -> ArtifactRef:
    """Commit the trainer's policy as version `stage.step`: what changed since `parent`, or, without one, all of it.
    An adapter is always all of it.

    Every `config.anchor_every`-th version holds all of it besides.
    """
    if done := stage.committed():
        return done
    adapter = trainer.adapter_config()
    is_delta = parent is not None and config.form != "full" and adapter is None
    is_anchor = is_delta and stage.step % config.anchor_every == 0
    work = _Work(
        stage.store,
        stage.key,
        parent if is_delta else None,
        adapter is not None,
        is_anchor,
        codec_follows=config.form != "full" and adapter is None and not is_delta,
    )
    seconds = {"engine_s": 0.0}

    def parts() -> list[Part]:
        written = trainer.each(_write_share, work)
        seconds["engine_s"] = written[0][1]
        return [part for part, _ in written]

    ref, is_ours = writer.commit(
        Store.at(stage.store),
        stage.key,
        parts,
        form="adapter" if adapter is not None else "delta" if is_delta and not is_anchor else "full",
        version=stage.step,
        step=stage.step,
        parent=parent,
        base=describe(parent).policy_digest if parent else None,
        adapter_config=adapter,
        inputs=stage.inputs,
        config_hash=stage.settings,
        provenance=seconds,
    )
    if is_delta and is_ours:
        trainer.each(_settle, ref)
    return ref


def _write_share(process: PolicyProcess, work: _Work) -> tuple[Part, float]:
    """What this process has written, and the seconds that the trainer took to export."""
    export = _Timed(process.export())
    store, share = Store.at(work.store), Share(process.rank, process.processes)
    try:
        if work.is_adapter:  # small
            part = writer.full_part(store, work.key, export) if process.rank == 0 else Part.empty()
        elif work.parent is None:
            part = writer.full_part(store, work.key, export, share)
            if work.codec_follows:  # compile it while the engines sample
                dtypes = {dtype_of(info) for info in part.tensors.values()}
                threading.Thread(target=_warm_up, args=(dtypes,), name="codec", daemon=True).start()
        else:
            mirror, process.committed = process.committed, None  # a fault below leaves it between two versions
            if mirror is None or mirror.ref != work.parent:
                mirror = reader.mirror_of(work.parent, names=share.names(describe(work.parent)))
            part = writer.delta_part(store, work.key, export, mirror, share, work.is_anchor)
            process.committed = mirror
    finally:
        for _ in export:  # the other processes' wait for this one's
            pass
    return part, export.seconds


def _settle(process: PolicyProcess, ref: ArtifactRef) -> None:
    """The version of which this process holds its share is committed."""
    if process.committed is not None:
        process.committed.ref = ref


class _Timed:
    """An iterator that counts the seconds that its items take to come."""

    def __init__(self, tensors: "Iterator[tuple[str, torch.Tensor]]"):
        self._tensors, self.seconds = tensors, 0.0

    def __iter__(self) -> "_Timed":
        return self

    def __next__(self) -> "tuple[str, torch.Tensor]":
        started = time.perf_counter()
        try:
            return next(self._tensors)
        finally:
            self.seconds += time.perf_counter() - started


def _warm_up(dtypes: "set[torch.dtype]") -> None:
    from infra.policy.codec import frame
    from infra.policy.codec.layout import layout_of

    for layout in {layout_of(dtype) for dtype in dtypes}:
        frame.warm_up(layout)
