"""Engine side, inside its process: bring an engine to a policy version, from the store, in place."""

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from infra import policy
from infra.artifacts import ArtifactRef
from infra.errors import Corrupted

if TYPE_CHECKING:
    import torch
    from numpy import ndarray

    from infra.codec.frame import Changes

_log = logging.getLogger(__name__)
_HASHERS = 2


class PolicySink(Protocol):
    """What applying needs of a rollout engine."""

    version: str | None
    """Policy digest of what it holds; None when that is not known."""

    def apply(self, tensors: "Iterable[tuple[str, torch.Tensor]]", version: str) -> None:
        """Take over the tensors in place, or keep the old ones and raise."""
        ...

    def apply_adapter(self, tensors: "dict[str, torch.Tensor]", config: dict[str, Any], version: str) -> None:
        """Take over an adapter in place of the last one, or keep that and raise."""
        ...

    def words(self, name: str, dtype: "torch.dtype") -> "ndarray | None":
        """The bits of a tensor that it holds (infra/codec/layout.py), of the policy's dtype; None if it cannot tell."""
        ...

    def prepare(self, changes: "Iterable[tuple[str, torch.dtype, Changes]]") -> Any:
        """What `commit` will write. Goes on serving, and changes nothing."""
        ...

    def commit(self, update: Any, version: str) -> None:
        """Pause, write in place, resume; or keep the old weights and raise."""
        ...


class _CannotTell(Exception):
    """The engine does not tell its own weights, so changes relative to them cannot be decoded."""


def follow(engine: PolicySink, ref: ArtifactRef) -> None:
    """Bring the engine to the policy version `ref`; a no-op when it is there.

    It goes from version to version by what changed, where the store has that and it is less than the whole; each is
    verified by the digests of all changed tensors before the engine pauses. Should the engine not hold what it is taken
    to, it gets the whole version.
    """
    newest = policy.describe(ref)
    if newest.adapter_config is not None:
        if engine.version != newest.policy_digest:
            engine.apply_adapter(dict(policy.read(ref)), newest.adapter_config, newest.policy_digest)
        return
    path = policy.chain(ref, engine.version)
    if not path:
        return
    if not path[0][1].is_delta or path[0][1].base != engine.version:
        engine.apply(policy.read(ref), path[-1][1].policy_digest)
        return
    try:
        for at, what in path:
            engine.commit(engine.prepare(decode(engine, at, what)), what.policy_digest)
    except (_CannotTell, Corrupted) as fault:
        if isinstance(fault, Corrupted):
            _log.warning("the engine gets %s whole: %s", ref.uri, fault)
        engine.apply(policy.read(ref), path[-1][1].policy_digest)


def decode(
    engine: PolicySink, ref: ArtifactRef, what: policy.PolicyVersion
) -> "Iterator[tuple[str, torch.dtype, Changes]]":
    """(name, dtype, what changes) of a delta to the engine's version, each tensor's result verified by its digest.

    Hashing goes on in threads; nothing is yielded of a version before all of it has been verified: an iterator that
    raises has had no effect.
    """
    olds: dict[str, ndarray] = {}

    def words(name: str) -> "ndarray":
        found = engine.words(name, policy.dtype_of(what.tensors[name]))
        if found is None:
            raise _CannotTell(name)
        olds[name] = found
        return found

    checks: list[Future[None]] = []
    decoded: list[tuple[str, torch.dtype, Changes]] = []
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="verify") as pool:
        for name, changes in policy.changes(ref, what, words):
            info = what.tensors[name]
            while len(checks) >= 2 * _HASHERS:  # bounds the tensors that are held
                checks.pop(0).result()
            checks.append(pool.submit(_verify, name, olds.pop(name), changes, info, ref))
            decoded.append((name, policy.dtype_of(info), changes))
        for check in checks:
            check.result()
    yield from decoded


def _verify(name: str, old: "ndarray", changes: "Changes", info: policy.TensorInfo, ref: ArtifactRef) -> None:
    new = old.copy()
    new[changes.positions] = changes.values
    if policy.digest_of(memoryview(new).cast("B")) != info.digest:
        raise Corrupted(f"tensor {name!r} of {ref.uri}, made of the engine's own, is not the one that was published")
