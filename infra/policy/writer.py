"""Policy versions are written: all tensors of one, or what changed since its parent; by one process, or by several.

Each process streams its share of the tensors (`Part`) into the store; then one commits what all have written. Writers that
die leave complete files; the next ones of the version, in other processes, write only the others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from infra.errors import BadInput
from infra.policy.version import (
    FILES,
    KIND,
    Frame,
    PolicyVersion,
    TensorInfo,
    describe,
    dtype_of,
    info_of,
    policy_digest,
)
from infra.storage.artifacts import ArtifactRef, ArtifactWriter, Store
from infra.storage.manifest import Written

if TYPE_CHECKING:
    from torch import Tensor

    from infra.policy.mirror import Mirror

type Tensors = Iterable[tuple[str, Tensor]]


class Share(NamedTuple):
    """Which of the processes that write a version this one is. All see all tensors go by, in one order."""

    rank: int = 0
    of: int = 1

    def turn(self, tensors: Tensors, size: int) -> "Iterator[tuple[str, Tensor]]":
        """This process's tensors: `size` bytes for each in turn."""
        passed = 0
        for name, tensor in tensors:
            if passed // size % self.of == self.rank:
                yield name, tensor
            passed += tensor.nbytes

    def names(self, version: PolicyVersion) -> set[str]:
        """This process's tensors of the versions that follow one: equal bytes for each, as near as may be."""
        sizes = {name: prod(info.shape) * dtype_of(info).itemsize for name, info in version.tensors.items()}
        load, own = [0] * self.of, set[str]()
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            rank = load.index(min(load))
            load[rank] += sizes[name]
            if rank == self.rank:
                own.add(name)
        return own

    def file(self, name: str) -> str:
        """What this process's files are called, so that no other's are."""
        return name if self.of == 1 else f"{name}-r{self.rank:02d}"


WHOLE = Share()
"""Of the only process that writes."""


@dataclass
class Part:
    """What one process has written of a version."""

    written: Written
    tensors: dict[str, TensorInfo]
    """Its share, as they are in the version."""
    frames: list[Frame] | None = None
    """What changed in them since the parent; None when that was not asked."""

    @classmethod
    def empty(cls) -> "Part":
        """Of a process that has nothing to write."""
        return cls(Written([], []), {})


def full_part(store: Store, key: str, tensors: Tensors, share: Share = WHOLE, shard_bytes: int | None = None) -> Part:
    """Write this process's share of the tensors (checkpoint names, each in its serving dtype) into the version `key`.

    Holds one shard at a time: see ArtifactWriter.tensors.
    """
    from infra.storage.safetensors import SHARD_BYTES

    size, infos = shard_bytes or SHARD_BYTES, dict[str, TensorInfo]()

    def described() -> "Iterator[tuple[str, Tensor]]":
        for name, tensor in share.turn(tensors, size):
            infos[name] = info_of(tensor)
            yield name, tensor

    with closing(ArtifactWriter(store, key, KIND, resumable=True)) as writer:
        files = writer.tensors(share.file(FILES), described(), size)
        placed = {name: info.model_copy(update={"file": files[name]}) for name, info in infos.items()}
        return Part(writer.written(), placed)


def delta_part(
    store: Store, key: str, tensors: Tensors, parent: "Mirror", share: Share = WHOLE, anchor: bool = False
) -> Part:
    """Write what changed of this process's share since the version that `parent` holds the share of; `parent` becomes the
    new version, and its `ref` is the caller's to set once that is committed.

    All tensors must have the parent's names, dtypes and shapes, else BadInput. `anchor`: write them whole, too. Beside
    the mirror (a file), six groups are held and one a dtype, each of a 24th of the share but of 64 MiB at most, and the
    largest tensor.
    """
    from infra.policy.deltas import DeltaFiles, frame_bytes

    if parent.ref is None:
        raise BadInput("the parent's mirror holds no whole version")
    base = describe(parent.ref)
    own = share.names(base)
    size = frame_bytes(sum(parent.tensor(name).nbytes for name in own))
    parent.ref = None
    with closing(ArtifactWriter(store, key, KIND, resumable=True)) as writer:
        delta = DeltaFiles(writer, parent, size, share.file("delta"))

        def passing() -> "Iterator[tuple[str, Tensor]]":
            for name, tensor in _fitting(tensors, base):
                if name in own:
                    delta.add(name, tensor)
                    yield name, tensor

        files: dict[str, str] = {}
        try:
            if anchor:
                files = writer.tensors(share.file(FILES), passing(), 2 * size)
            else:
                for _ in passing():
                    pass
            delta.finish()
        finally:
            delta.close()
        changed = {
            name: {"file": files.get(name), "digest": delta.digests.get(name, base.tensors[name].digest)}
            for name in own
        }
        infos = {name: base.tensors[name].model_copy(update=update) for name, update in changed.items()}
        return Part(writer.written(), infos, delta.frames)


def _fitting[T: "Tensor | TensorInfo"](
    tensors: Iterable[tuple[str, T]], base: PolicyVersion
) -> Iterator[tuple[str, T]]:
    """The tensors, which must be those of the version, but for their values. BadInput names one that is not."""
    missing = dict(base.tensors)
    for name, tensor in tensors:
        info, dtype, shape = missing.pop(name, None), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if info is None or (info.dtype, info.shape) != (dtype, shape):
            raise BadInput(f"tensor {name!r} ({dtype} {shape}): the parent has no such one")
        yield name, tensor
    if missing:
        raise BadInput(f"the parent's tensor {min(missing)!r} is missing")


def commit(
    store: Store,
    key: str,
    parts: Callable[[], Sequence[Part]],
    *,
    version: int,
    step: int,
    form: Literal["full", "delta", "adapter"] = "full",
    base: str | None = None,
    parent: ArtifactRef | None = None,
    adapter_config: dict[str, Any] | None = None,
    inputs: Sequence[ArtifactRef] = (),
    config_hash: str = "",
    metadata: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> tuple[ArtifactRef, bool]:
    """The version that `parts` writes when it is called; and whether that has the parts' weights: else another writer's
    was there first.

    `form`, `base`, `parent`, `adapter_config`: see PolicyVersion. `metadata` adds facts beside PolicyVersion's.
    """
    if taken := (metadata or {}).keys() & PolicyVersion.model_fields.keys():
        raise BadInput(f"metadata of a policy: {sorted(taken)} are the version's own")
    what: PolicyVersion | None = None
    with ArtifactWriter(
        store,
        key,
        KIND,
        inputs=inputs,
        config_hash=config_hash,
        metadata=metadata,
        provenance=provenance,
        resumable=True,
    ) as writer:
        tensors, frames = dict[str, TensorInfo](), list[list[Frame]]()
        for part in parts():
            writer.include(part.written)
            if twice := tensors.keys() & part.tensors.keys():
                raise BadInput(f"policy {store.uri(key)}: tensor {min(twice)!r} is repeated")
            tensors |= part.tensors
            if part.frames is not None:
                frames.append(part.frames)
        if not tensors:
            raise BadInput(f"policy {store.uri(key)}: there are no tensors to write")
        before = describe(parent) if parent is not None else None
        if before is not None and (before.form == "adapter") == (form == "adapter"):
            list(_fitting(tensors.items(), before))  # an export may have lost one, or a process's share be missing
        what = PolicyVersion(
            version=version,
            form=form,
            step=step,
            base=base,
            parent=parent,
            tensors=tensors,
            frames=[entry for part in frames for entry in part] if frames else None,
            policy_digest=policy_digest(tensors),
            adapter_config=adapter_config,
        )
        writer.metadata.update(what.model_dump(mode="json") | {"parent": parent and parent.digest})
        if parent is not None:
            writer.inputs = [*writer.inputs, parent]
    ref = writer.ref
    return ref, what is not None and describe(ref).policy_digest == what.policy_digest


def write_full(
    store: Store, key: str, tensors: Tensors, *, shard_bytes: int | None = None, **described: Any
) -> ArtifactRef:
    """All tensors, as the version `key`, by this process alone. `described`: see `commit`."""
    return commit(store, key, lambda: [full_part(store, key, tensors, shard_bytes=shard_bytes)], **described)[0]
