"""Policy versions are written: all tensors of one, or what changed since its parent.

A writer that dies leaves complete files; the next one of the version, in another process, writes only the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infra import policy
from infra.artifacts import ArtifactRef, Store
from infra.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from infra.artifacts import ArtifactWriter
    from infra.mirror import Mirror


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
    infos: dict[str, policy.TensorInfo] = {}

    def described() -> "Iterator[tuple[str, Tensor]]":
        for name, tensor in tensors:
            infos[name] = policy.info_of(tensor)
            if mirror is not None:
                mirror.tensor(name).copy_(tensor)
            yield name, tensor

    extra = _own(metadata)
    if mirror is not None:
        mirror.ref = None
    what: policy.PolicyVersion | None = None
    with store.write(
        key, policy.KIND, inputs=inputs, config_hash=config_hash, metadata=extra, provenance=provenance, resumable=True
    ) as writer:
        files = writer.tensors(policy.FILES, described(), shard_bytes)
        if not infos:
            raise BadInput(f"policy {store.uri(key)}: there are no tensors to write")
        placed = {name: info.model_copy(update={"file": files[name]}) for name, info in infos.items()}
        what = policy.PolicyVersion(
            version=version, form="full" if adapter_config is None else "adapter", step=step, base=base, parent=parent,
            tensors=placed, policy_digest=policy.policy_digest(placed), adapter_config=adapter_config,
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
    the mirror (a file), seven groups are held, each of a 24th of the model but of 64 MiB at most, and the largest
    tensor.
    """
    from infra.deltas import DeltaFiles, frame_bytes
    from infra.tensors import dtype_name

    if parent.ref is None:
        raise BadInput("the parent's mirror holds no whole version")
    base = policy.describe(parent.ref)
    size = sum(parent.tensor(name).nbytes for name in parent.names)
    extra = _own(metadata)
    ref, parent.ref = parent.ref, None
    what: policy.PolicyVersion | None = None
    with store.write(
        key, policy.KIND, inputs=inputs, config_hash=config_hash, metadata=extra, provenance=provenance, resumable=True
    ) as writer:
        delta = DeltaFiles(writer, parent, frame_bytes(size))
        seen: set[str] = set()

        def passing() -> "Iterator[tuple[str, Tensor]]":
            for name, tensor in tensors:
                if name in seen or not parent.fits(name, tensor):
                    raise BadInput(
                        f"tensor {name!r} ({dtype_name(tensor.dtype)} {list(tensor.shape)}): the parent has no such one"
                    )
                seen.add(name)
                delta.add(name, tensor)
                yield name, tensor

        try:
            files: dict[str, str] = {}
            if anchor:
                files = writer.tensors(policy.FILES, passing(), 2 * frame_bytes(size))
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
        what = policy.PolicyVersion(
            version=version, form="full" if anchor else "delta", step=step, base=base.policy_digest, parent=ref,
            frames=delta.frames, tensors=infos, policy_digest=policy.policy_digest(infos),
        )  # fmt: skip
        _say(writer, what)
    _settle(parent, writer.ref, what)
    return writer.ref


def _say(writer: "ArtifactWriter", what: policy.PolicyVersion) -> None:
    writer.metadata.update(what.model_dump(mode="json") | {"parent": what.parent and what.parent.digest})
    if what.parent is not None:
        writer.inputs = [*writer.inputs, what.parent]


def _own(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if taken := (metadata or {}).keys() & policy.PolicyVersion.model_fields.keys():
        raise BadInput(f"metadata of a policy: {sorted(taken)} are the version's own")
    return dict(metadata or {})


def _settle(mirror: "Mirror | None", ref: ArtifactRef, what: policy.PolicyVersion | None) -> None:
    """The mirror is the committed version, unless another writer's was, with other weights or before all was written."""
    if mirror is not None and what is not None and policy.describe(ref).policy_digest == what.policy_digest:
        mirror.ref = ref
