"""Policy versions: artifacts of kind "policy" that say dtype, shape and digest of every tensor.

A version holds its tensors (full), or what changed since its parent (delta), or both: then it is an anchor, which a
fresh engine starts from and a warm one passes by. The policy digest is a property of the weights alone: equal weights
have equal digests, however they are sharded, named in the store, or come by. It is the `policy_version` of rollouts.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from infra.errors import BadInput
from infra.storage.artifacts import ArtifactRef, digest_of, open_artifact
from infra.storage.manifest import Frozen, canonical

if TYPE_CHECKING:
    from torch import Tensor, dtype

KIND = "policy"
FILES = "model"
"""The name of a version's tensors in its artifact."""


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
    """Coded changes of some tensors (infra/policy/codec)."""

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
    tensors, all in this artifact, that go with the model that the run started from."""
    step: int
    """Optimizer steps applied."""
    base: str | None = None
    """Policy digest of the version that this one was trained from; None for the first."""
    parent: ArtifactRef | None = None
    """The version with the digest `base`, that `frames` are relative to; of an adapter, the one before."""
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
    from infra.numerics.tensors import tensor_bytes

    return digest_of(tensor_bytes(tensor))


def policy_digest(tensors: Mapping[str, TensorInfo]) -> str:
    """Digest over the sorted (name, dtype, shape, tensor digest)."""
    return digest_of(canonical([[name, t.dtype, t.shape, t.digest] for name, t in sorted(tensors.items())]))


def digest_tensors(tensors: "Iterable[tuple[str, Tensor]]") -> str:
    """The policy digest of weights in memory, to compare an engine's with a version's."""
    return policy_digest({name: info_of(tensor) for name, tensor in tensors})


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


def dtype_of(info: TensorInfo) -> "dtype":
    """torch's dtype of a tensor."""
    import torch

    return getattr(torch, info.dtype)


def info_of(tensor: "Tensor") -> TensorInfo:
    """Of a tensor in memory, that no file holds."""
    from infra.numerics.tensors import dtype_name

    dtype, digest = dtype_name(tensor.dtype), tensor_digest(tensor)
    return TensorInfo(dtype=dtype, shape=list(tensor.shape), digest=digest, file=None)
