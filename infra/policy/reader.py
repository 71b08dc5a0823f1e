"""Policy versions are read: from the cheapest chain of a full version and deltas, checked by their digests."""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from infra.errors import BadInput, Corrupted, Missing
from infra.policy.version import FILES, Frame, PolicyVersion, describe, dtype_of, tensor_digest
from infra.storage.artifacts import ArtifactRef, open_artifact

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

    from infra.policy.codec.frame import Changes
    from infra.policy.mirror import Mirror

_DECODERS = 2

type Chain = list[tuple[ArtifactRef, PolicyVersion]]
"""Versions to be read, one after the other."""


def chain(ref: ArtifactRef, have: str | None = None) -> Chain:
    """The versions to read, in order, to come to `ref` with the fewest bytes.

    The first is full and is read whole, the rest are deltas; or all are deltas, the first to the version of digest
    `have`, that the reader holds. Empty when it holds `ref`. Raises BadInput when no chain is left in the store.

    A version's parent may be gone, or another artifact than it was (collected and made again, from a checkpoint): the
    way through it is closed, others may be open.
    """
    path: Chain = []
    best: Chain | None = None
    closed: Exception | None = None
    cheapest, spent = float("inf"), 0
    at: ArtifactRef | None = ref
    while at is not None and spent < cheapest:
        try:
            what = describe(at)
        except (Missing, Corrupted) as fault:
            if at is ref:
                raise
            closed = fault
            break
        if what.policy_digest == have and what.form != "adapter":
            return path[::-1]
        path.append((at, what))
        if what.is_full and (cost := spent + _full_bytes(at)) < cheapest:
            best, cheapest = path[::-1], cost
        if not what.is_delta:
            break
        if what.base == have:
            return path[::-1]
        spent += sum(frame.bytes for frame in what.frames or [])
        at = what.parent
    if best is None:
        raise BadInput(f"{ref.uri} cannot be read: no full version is left that its deltas lead to") from closed
    return best


def read(ref: ArtifactRef) -> "Iterator[tuple[str, Tensor]]":
    """All tensors of a version, checked. Raises Corrupted naming the file or tensor.

    One shard is in memory at a time (views of the mapped files, for file://) when the version is full; a delta's are
    made in a mirror, a scratch file, of which views are yielded. A consumer that changes live weights must be able to
    roll back, or read everything first. Of an adapter, its own tensors.
    """
    if (what := describe(ref)).form == "adapter":
        yield from _read_full(ref, what)
        return
    path = chain(ref)
    if len(path) == 1:
        yield from _read_full(*path[0])
        return
    mirror = mirror_of(ref, path)
    for name in mirror.names:
        yield name, mirror.tensor(name)


def mirror_of(ref: ArtifactRef, path: Chain | None = None, names: Collection[str] | None = None) -> "Mirror":
    """A mirror that holds the version, or some tensors of it, read from the store and checked."""
    from infra.policy.mirror import Mirror

    path = chain(ref) if path is None else path
    infos = path[-1][1].tensors
    read, *needed = _needed(infos if names is None else names, path)
    mirror = Mirror({name: (dtype_of(infos[name]), infos[name].shape) for name in infos if name in read})
    mirror.fill(_read_full(*path[0], read), path[0][0])
    advance(mirror, path[1:], needed)
    decoded = {name for _, what in path[1:] for entry in what.frames or [] for name in entry.tensors}
    for name in decoded if names is None else decoded.intersection(names):  # one that came back to what it was, too
        if tensor_digest(mirror.tensor(name)) != infos[name].digest:
            raise Corrupted(f"tensor {name!r} of {ref.uri} is not the one that was committed")
    if names is None or len(read) == len(names):
        return mirror
    some = Mirror({name: (dtype_of(infos[name]), infos[name].shape) for name in names})
    some.fill(((name, mirror.tensor(name)) for name in names), ref)
    return some


def advance(mirror: "Mirror", path: Chain, needed: Sequence[Container[str]] | None = None) -> None:
    """Take a mirror, of the parent of the first of some deltas, to the last. The result is not checked. `needed`: for each,
    the tensors that have to be those of the version afterwards, as `_needed` says; None: all."""
    for (at, what), names in zip(path, needed or [None] * len(path), strict=True):
        mirror.ref = None
        for name, found in changes(at, what, mirror.words, names):
            mirror.words(name)[found.positions] = found.values
        mirror.ref = at


def _needed(names: Collection[str], path: Chain) -> list[set[str]]:
    """For each version of the path the tensors that must be read, or made, for some of the last one: those that were coded in
    one frame are decoded together, all from what they are in the version before."""
    needed = [set(names)]
    for _, what in reversed(path[1:]):
        before = set(needed[0])
        for entry in what.frames or []:
            if not needed[0].isdisjoint(entry.tensors):
                before |= set(entry.tensors)
        needed.insert(0, before)
    return needed


def changes(
    ref: ArtifactRef,
    what: PolicyVersion,
    old: "Callable[[str], ndarray]",
    names: Container[str] | None = None,
) -> "Iterator[tuple[str, Changes]]":
    """(name, what changes) of a delta version's tensors. `old(name)`: the parent's words, flat (infra/policy/codec/layout.py).
    `names`: leave out frames in which there is none of these.

    Frames are decoded in threads, which call `old`; a few frames' tensors and one file of coded changes are in memory at
    a time. Raises Corrupted.
    """
    from infra.policy.codec import frame
    from infra.policy.codec.layout import layout_of

    artifact = open_artifact(ref)
    frames = [entry for entry in what.frames or [] if names is None or any(name in names for name in entry.tensors)]

    def decode(entry: Frame, data: memoryview) -> "list[Changes]":
        layout = layout_of(dtype_of(what.tensors[entry.tensors[0]]))
        return frame.decode(data, [old(name) for name in entry.tensors], layout)

    file, data = None, memoryview(b"")
    running: deque[tuple[Frame, Future[list[Changes]]]] = deque()
    with ThreadPoolExecutor(_DECODERS, thread_name_prefix="decode") as pool:
        for entry in frames:
            if entry.file != file:
                file, data = entry.file, memoryview(artifact.buffer(entry.file))
            while len(running) > _DECODERS:
                done, found = running.popleft()
                yield from zip(done.tensors, found.result(), strict=True)
            running.append((entry, pool.submit(decode, entry, data[entry.offset : entry.offset + entry.bytes])))
        while running:
            done, found = running.popleft()
            yield from zip(done.tensors, found.result(), strict=True)


def _read_full(
    ref: ArtifactRef, what: PolicyVersion, names: Collection[str] | None = None
) -> "Iterator[tuple[str, Tensor]]":
    """Of all tensors or some; shards without any of these are not read. A shard is checked whole before its first tensor is
    yielded."""
    from infra.numerics.tensors import dtype_name
    from infra.storage.safetensors import read_safetensors

    wanted = set(what.tensors if names is None else names)
    artifact, seen = open_artifact(ref), set[str]()
    for file in sorted({str(what.tensors[name].file) for name in wanted}):
        for name, tensor in read_safetensors(artifact.buffer(file)):
            info = what.tensors.get(name)
            if info is None or (info.dtype, info.shape) != (dtype_name(tensor.dtype), list(tensor.shape)):
                raise Corrupted(f"tensor {name!r} of {ref.uri} is not as its manifest says")
            if name in wanted:
                seen.add(name)
                yield name, tensor
    if missing := wanted - seen:
        raise Corrupted(f"{ref.uri} lacks tensors of its manifest: {sorted(missing)[:5]}")


def _full_bytes(ref: ArtifactRef) -> int:
    files = open_artifact(ref).manifest.files
    return sum(entry.bytes for entry in files if entry.name.startswith(f"{FILES}-"))
