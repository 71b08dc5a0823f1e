"""Policy versions: artifacts of kind "policy" that say dtype, shape and digest of every tensor.

A version holds its tensors (full), or what changed since its parent (delta), or both: then it is an anchor, which a
fresh engine starts from and a warm one passes by. The policy digest is a property of the weights alone: equal weights
have equal digests, however they are sharded, named in the store, or come by. It is the `policy_version` of rollouts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from infra.artifacts import ArtifactRef, Store, digest_of, open_artifact
from infra.errors import BadInput, Corrupted
from infra.manifest import Frozen, canonical

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor, dtype

    from infra.artifacts import ArtifactWriter
    from infra.codec.frame import Changes
    from infra.mirror import Mirror

KIND = "policy"
_FILES = "model"
_DECODERS = 2


class TensorInfo(Frozen):
    """One tensor of a version."""

    dtype: str
    """torch's name: bfloat16, float32, float8_e4m3fn, ..."""
    shape: list[int]
    """As in the checkpoint."""
    digest: str
    """`blake3:<hex>` of its bytes: contiguous, row-major, little-endian."""
    file: str | None
    """The artifact's file that holds it; None when the artifact only has what changed."""


class Frame(Frozen):
    """Coded changes of some tensors (infra/codec)."""

    file: str
    """The artifact's file that holds it."""
    offset: int
    """Its first byte there."""
    bytes: int
    """Its length."""
    tensors: list[str]
    """Whose changes they are, all of one layout, in the order that they are coded in."""


class PolicyVersion(Frozen):
    """The metadata of a policy artifact."""

    version: int
    """Counts the run's versions; 0 is the model that the run started from."""
    form: Literal["full", "delta", "adapter"]
    """full: every tensor is in this artifact. delta: only what changed since `parent`. adapter: a low-rank update's
    tensors, all in this artifact, that go with `parent`."""
    step: int
    """Optimizer steps applied."""
    base: str | None = None
    """Policy digest of the version that this one was trained from; None for the first."""
    parent: ArtifactRef | None = None
    """The version with the digest `base`: `frames` are relative to it, and an adapter goes with it."""
    frames: list[Frame] | None = None
    """What changed since `parent`; tensors in none of them are the parent's. A full version may have them too."""
    tensors: dict[str, TensorInfo]
    """By name, those of the Hugging Face checkpoint; PEFT's, for an adapter."""
    policy_digest: str
    """`policy_digest(tensors)`."""
    adapter_config: dict[str, Any] | None = None
    """Of an adapter: PEFT's adapter_config.json."""

    @property
    def is_full(self) -> bool:
        """Whether every tensor can be read from this artifact alone."""
        return self.form != "delta"

    @property
    def is_delta(self) -> bool:
        """Whether the version can be made of its parent's tensors."""
        return self.parent is not None and self.frames is not None


def tensor_digest(tensor: "Tensor") -> str:
    """`blake3:<hex>` of a tensor's bytes; any dtype, device and strides. Dtype and shape are not part of it."""
    from infra.tensors import tensor_bytes

    return digest_of(tensor_bytes(tensor))


def policy_digest(tensors: Mapping[str, TensorInfo]) -> str:
    """Digest over the sorted (name, dtype, shape, tensor digest)."""
    return digest_of(canonical([[name, t.dtype, t.shape, t.digest] for name, t in sorted(tensors.items())]))


def digest_tensors(tensors: "Iterable[tuple[str, Tensor]]") -> str:
    """The policy digest of weights in memory, to compare an engine's with a version's."""
    return policy_digest({name: _info(tensor, "") for name, tensor in tensors})


def write_full(
    store: Store,
    key: str,
    tensors: "Iterable[tuple[str, Tensor]]",
    *,
    version: int,
    step: int,
    base: str | None = None,
    inputs: Sequence[ArtifactRef] = (),
    config_hash: str = "",
    metadata: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    shard_bytes: int | None = None,
    mirror: "Mirror | None" = None,
    parent: ArtifactRef | None = None,
    adapter_config: dict[str, Any] | None = None,
) -> ArtifactRef:
    """Write every tensor (checkpoint names, each in its serving dtype) as the version `key`.

    `metadata` adds facts beside PolicyVersion's. Holds one shard at a time: see ArtifactWriter.tensors. `mirror`
    becomes this version. `parent` (of digest `base`): the version before. With `adapter_config` the tensors are an
    adapter's (infra/adapters.py), that goes with the run's base model.
    """
    infos: dict[str, TensorInfo] = {}

    def described() -> "Iterator[tuple[str, Tensor]]":
        for name, tensor in tensors:
            infos[name] = _info(tensor, None)
            if mirror is not None:
                mirror.tensor(name).copy_(tensor)
            yield name, tensor

    extra = _own(metadata)
    if mirror is not None:
        mirror.ref = None
    what: PolicyVersion | None = None
    with store.write(
        key, KIND, inputs=inputs, config_hash=config_hash, metadata=extra, provenance=provenance
    ) as writer:
        files = writer.tensors(_FILES, described(), shard_bytes)
        if not infos:
            raise BadInput(f"policy {store.uri(key)}: there are no tensors to write")
        placed = {name: info.model_copy(update={"file": files[name]}) for name, info in infos.items()}
        what = PolicyVersion(
            version=version, form="full" if adapter_config is None else "adapter", step=step, base=base, parent=parent,
            tensors=placed, policy_digest=policy_digest(placed), adapter_config=adapter_config,
        )  # fmt: skip
        _say(writer, what)
    _settle(mirror, writer.ref, what)
    return writer.ref


def write_delta(
    store: Store,
    key: str,
    tensors: "Iterable[tuple[str, Tensor]]",
    parent: "Mirror",
    *,
    version: int,
    step: int,
    anchor: bool = False,
    inputs: Sequence[ArtifactRef] = (),
    config_hash: str = "",
    provenance: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> ArtifactRef:
    """Write what changed since the version that `parent` holds; `parent` becomes the new version.

    The tensors must have the parent's names, dtypes and shapes, else BadInput. `anchor`: write them whole, too. Beside
    the mirror (a file), about a quarter of the model or a few groups of 64 MiB are held, whichever is less, and the
    largest tensor.
    """
    from infra.deltas import DeltaFiles, frame_bytes

    if parent.ref is None:
        raise BadInput("the parent's mirror holds no whole version")
    base = describe(parent.ref)
    size = sum(parent.tensor(name).nbytes for name in parent.names)
    extra = _own(metadata)
    ref, parent.ref = parent.ref, None
    what: PolicyVersion | None = None
    with store.write(
        key, KIND, inputs=inputs, config_hash=config_hash, metadata=extra, provenance=provenance
    ) as writer:
        delta = DeltaFiles(writer, parent, frame_bytes(size))
        seen: set[str] = set()

        def passing() -> "Iterator[tuple[str, Tensor]]":
            for name, tensor in tensors:
                if name in seen or not parent.fits(name, tensor):
                    raise BadInput(
                        f"tensor {name!r} ({_dtype(tensor)} {list(tensor.shape)}): the parent has no such one"
                    )
                seen.add(name)
                delta.add(name, tensor)
                yield name, tensor

        try:
            files: dict[str, str] = {}
            if anchor:
                files = writer.tensors(_FILES, passing(), 2 * frame_bytes(size))
            else:
                for _ in passing():
                    pass
            delta.finish()
        finally:
            delta.close()
        if missing := sorted(base.tensors.keys() - seen):
            raise BadInput(f"policy {store.uri(key)}: the parent's tensor {missing[0]!r} is missing")
        infos = {
            name: info.model_copy(update={"file": files.get(name), "digest": delta.digests.get(name, info.digest)})
            for name, info in base.tensors.items()
        }
        what = PolicyVersion(
            version=version, form="full" if anchor else "delta", step=step, base=base.policy_digest, parent=ref,
            frames=delta.frames, tensors=infos, policy_digest=policy_digest(infos),
        )  # fmt: skip
        _say(writer, what)
    _settle(parent, writer.ref, what)
    return writer.ref


def _say(writer: "ArtifactWriter", what: PolicyVersion) -> None:
    writer.metadata.update(what.model_dump(mode="json") | {"parent": what.parent and what.parent.digest})
    if what.parent is not None:
        writer.inputs = [*writer.inputs, what.parent]


def _own(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if taken := (metadata or {}).keys() & PolicyVersion.model_fields.keys():
        raise BadInput(f"metadata of a policy: {sorted(taken)} are the version's own")
    return dict(metadata or {})


def _settle(mirror: "Mirror | None", ref: ArtifactRef, what: PolicyVersion | None) -> None:
    """The mirror is the committed version, unless another writer's was, with other weights or before all was written."""
    if mirror is not None and what is not None and describe(ref).policy_digest == what.policy_digest:
        mirror.ref = ref


def describe(ref: ArtifactRef) -> PolicyVersion:
    """What the version is, from its manifest alone. BadInput when `ref` is no policy version."""
    if ref.kind != KIND:
        raise BadInput(f"{ref.uri} is of kind {ref.kind!r}, expected {KIND!r}")
    artifact = open_artifact(ref)
    metadata = artifact.metadata
    own = {name: metadata[name] for name in PolicyVersion.model_fields if name in metadata}
    # A digest in the metadata, the ref among the inputs: what a version is does not depend on where its parent lies.
    own["parent"] = next((ref for ref in artifact.manifest.inputs if ref.digest == metadata.get("parent")), None)
    try:
        return PolicyVersion.model_validate(own)
    except ValidationError as error:
        raise BadInput(f"{ref.uri} is no policy version that this code can read: {error}") from error


def chain(ref: ArtifactRef, have: str | None = None) -> "list[tuple[ArtifactRef, PolicyVersion]]":
    """The versions to read, in order, to come to `ref` with the fewest bytes.

    The first is full and is read whole, the rest are deltas; or all are deltas, the first to the version of digest
    `have`, that the reader holds. Empty when it holds `ref`. Raises BadInput when no chain is left in the store.
    """
    path: list[tuple[ArtifactRef, PolicyVersion]] = []
    best: list[tuple[ArtifactRef, PolicyVersion]] | None = None
    cheapest, spent = float("inf"), 0
    at: ArtifactRef | None = ref
    while at is not None and spent < cheapest:
        try:
            what = describe(at)
        except BadInput:
            if at is ref:
                raise
            break  # collected
        if what.policy_digest == have and what.form != "adapter":
            return path[::-1]
        path.append((at, what))
        if what.is_full and (cost := spent + _full_bytes(at)) < cheapest:
            best, cheapest = path[::-1], cost
        if not what.is_delta:
            break
        spent += sum(frame.bytes for frame in what.frames or [])
        at = what.parent
    if best is None:
        raise BadInput(f"{ref.uri} cannot be read: no full version is left that its deltas lead to")
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


def mirror_of(ref: ArtifactRef, path: "list[tuple[ArtifactRef, PolicyVersion]] | None" = None) -> "Mirror":
    """A mirror that holds the version, read from the store and checked."""
    from infra.mirror import Mirror

    path = chain(ref) if path is None else path
    mirror = Mirror({name: (dtype_of(info), info.shape) for name, info in path[0][1].tensors.items()})
    mirror.fill(_read_full(*path[0]), path[0][0])
    for at, what in path[1:]:
        mirror.ref = None
        for name, found in changes(at, what, mirror.words):
            mirror.words(name)[found.positions] = found.values
        mirror.ref = at
    for name, info in path[-1][1].tensors.items():
        if info.digest != path[0][1].tensors[name].digest and tensor_digest(mirror.tensor(name)) != info.digest:
            raise Corrupted(f"tensor {name!r} of {ref.uri} is not the one that was published")
    return mirror


def changes(ref: ArtifactRef, what: PolicyVersion, old: "Callable[[str], ndarray]") -> "Iterator[tuple[str, Changes]]":
    """(name, what changes) of a delta version's tensors. `old(name)`: the parent's words, flat (infra/codec/layout.py).

    Frames are decoded in threads, which call `old`; a few frames' tensors and one file of coded changes are in memory at
    a time. Raises Corrupted.
    """
    from infra.codec import frame
    from infra.codec.layout import layout_of

    artifact, frames = open_artifact(ref), what.frames or []

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


def _read_full(ref: ArtifactRef, what: PolicyVersion) -> "Iterator[tuple[str, Tensor]]":
    """A shard is checked whole before its first tensor is yielded."""
    seen: set[str] = set()
    for name, tensor in open_artifact(ref).iter_tensors(_FILES):
        info = what.tensors.get(name)
        if info is None or (info.dtype, info.shape) != (_dtype(tensor), list(tensor.shape)):
            raise Corrupted(f"tensor {name!r} of {ref.uri} is not as its manifest says")
        seen.add(name)
        yield name, tensor
    if missing := what.tensors.keys() - seen:
        raise Corrupted(f"{ref.uri} lacks tensors of its manifest: {sorted(missing)[:5]}")


def _full_bytes(ref: ArtifactRef) -> int:
    files = open_artifact(ref).manifest.files
    return sum(entry.bytes for entry in files if entry.name.startswith(f"{_FILES}-"))


def dtype_of(info: TensorInfo) -> "dtype":
    """torch's dtype of a tensor."""
    import torch

    return getattr(torch, info.dtype)


def _info(tensor: "Tensor", file: str | None) -> TensorInfo:
    return TensorInfo(dtype=_dtype(tensor), shape=list(tensor.shape), digest=tensor_digest(tensor), file=file)


def _dtype(tensor: "Tensor") -> str:
    from infra.tensors import dtype_name

    return dtype_name(tensor.dtype)
