"""Policy versions: artifacts of kind "policy" that say dtype, shape and digest of every tensor.

The policy digest is a property of the weights alone: equal weights have equal digests, however they are sharded, named
in the store, or come by. It is the `policy_version` of rollouts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from infra.artifacts import ArtifactRef, Store, digest_of, open_artifact
from infra.errors import BadInput, Corrupted
from infra.manifest import Frozen, canonical

if TYPE_CHECKING:
    from torch import Tensor

KIND = "policy"
_FILES = "model"


class TensorInfo(Frozen):
    """One tensor of a version."""

    dtype: str
    """torch's name: bfloat16, float32, float8_e4m3fn, ..."""
    shape: list[int]
    """As in the checkpoint."""
    digest: str
    """`blake3:<hex>` of its bytes: contiguous, row-major, little-endian."""
    file: str
    """The artifact's file that holds it."""


class PolicyVersion(Frozen):
    """The metadata of a policy artifact."""

    version: int
    """Counts the run's versions; 0 is the model that the run started from."""
    form: Literal["full", "adapter"]
    """full: every tensor is in this artifact. adapter: a low-rank update's tensors, all in this artifact, that go with the
    run's base model."""
    step: int
    """Optimizer steps applied."""
    base: str | None = None
    """Policy digest of the version that this one was trained from; None for the first."""
    tensors: dict[str, TensorInfo]
    """By name, those of the Hugging Face checkpoint; PEFT's, for an adapter."""
    policy_digest: str
    """`policy_digest(tensors)`."""
    adapter_config: dict[str, Any] | None = None
    """Of an adapter: PEFT's adapter_config.json."""


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
    adapter_config: dict[str, Any] | None = None,
) -> ArtifactRef:
    """Write every tensor (checkpoint names, each in its serving dtype) as the version `key`.

    With `adapter_config` the tensors are an adapter's (infra/adapters.py).

    `metadata` adds facts beside PolicyVersion's. Holds one shard at a time: see ArtifactWriter.tensors.
    """
    infos: dict[str, TensorInfo] = {}

    def described() -> "Iterator[tuple[str, Tensor]]":
        for name, tensor in tensors:
            infos[name] = _info(tensor, "")
            yield name, tensor

    extra = dict(metadata or {})
    if taken := extra.keys() & PolicyVersion.model_fields.keys():
        raise BadInput(f"metadata of a policy: {sorted(taken)} are the version's own")
    with store.write(
        key, KIND, inputs=inputs, config_hash=config_hash, metadata=extra, provenance=provenance
    ) as writer:
        files = writer.tensors(_FILES, described(), shard_bytes)
        if not infos:
            raise BadInput(f"policy {store.uri(key)}: there are no tensors to write")
        placed = {name: info.model_copy(update={"file": files[name]}) for name, info in infos.items()}
        what = PolicyVersion(
            version=version, form="full" if adapter_config is None else "adapter", step=step, base=base, tensors=placed,
            policy_digest=policy_digest(placed), adapter_config=adapter_config,
        )  # fmt: skip
        writer.metadata.update(what.model_dump(mode="json"))
    return writer.ref


def describe(ref: ArtifactRef) -> PolicyVersion:
    """What the version is, from its manifest alone. BadInput when `ref` is no policy version."""
    if ref.kind != KIND:
        raise BadInput(f"{ref.uri} is of kind {ref.kind!r}, expected {KIND!r}")
    metadata = open_artifact(ref).metadata
    own = {name: metadata[name] for name in PolicyVersion.model_fields if name in metadata}
    try:
        return PolicyVersion.model_validate(own)
    except ValidationError as error:
        raise BadInput(f"{ref.uri} is no policy version that this code can read: {error}") from error


def read(ref: ArtifactRef) -> "Iterator[tuple[str, Tensor]]":
    """All tensors of a version, checked, one shard in memory at a time; for file:// views of the mapped files.

    A shard is checked whole before its first tensor is yielded. Raises Corrupted naming the file; a consumer that
    changes live weights must therefore be able to roll back, or read everything first.
    """
    what = describe(ref)
    seen: set[str] = set()
    for name, tensor in open_artifact(ref).iter_tensors(_FILES):
        info = what.tensors.get(name)
        if info is None or (info.dtype, info.shape) != (_dtype(tensor), list(tensor.shape)):
            raise Corrupted(f"tensor {name!r} of {ref.uri} is not as its manifest says")
        seen.add(name)
        yield name, tensor
    if missing := what.tensors.keys() - seen:
        raise Corrupted(f"{ref.uri} lacks tensors of its manifest: {sorted(missing)[:5]}")


def _info(tensor: "Tensor", file: str) -> TensorInfo:
    return TensorInfo(dtype=_dtype(tensor), shape=list(tensor.shape), digest=tensor_digest(tensor), file=file)


def _dtype(tensor: "Tensor") -> str:
    from infra.tensors import dtype_name

    return dtype_name(tensor.dtype)
