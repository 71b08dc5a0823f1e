"""Engine side, inside its process: bring an engine to a policy version, from the store, in place.

An engine goes from version to version by what changed, where the store has that and it is less than the whole. Reading,
decoding and verifying go on beside its work; it pauses only while elements are written (`FollowingSink.commit`).
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from infra.errors import BadInput, Corrupted
from infra.policy import reader
from infra.policy.sink import AdapterSink, FollowingSink
from infra.policy.version import PolicyVersion, TensorInfo, describe, digest_of, dtype_of, tensor_digest
from infra.storage.artifacts import ArtifactRef

if TYPE_CHECKING:
    import torch
    from numpy import ndarray

    from infra.policy.codec.frame import Changes

_log = logging.getLogger(__name__)
_HASHERS = 2


class Prefetch:
    """The first update on the way to a version, prepared in a thread while the engine works."""

    def __init__(self, engine: FollowingSink[Any], ref: ArtifactRef):
        self.ref, self.version = ref, engine.version
        self._updates = updates(engine, ref)
        self._first: tuple[Any, str] | None = None
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._first = next(self._updates, None)
        except Exception as fault:
            self._fault = fault

    def wait(self) -> None:
        """Return when nothing is read from the engine any more."""
        self._thread.join()

    def updates(self) -> Iterator[tuple[Any, str]]:
        """As `updates`, with what is ready; raises what the thread met."""
        self.wait()
        if self._fault is not None:
            raise self._fault
        if self._first is not None:
            yield self._first
            yield from self._updates


def prefetch(engine: FollowingSink[Any], ref: ArtifactRef) -> None:
    """Begin to prepare the way to `ref` and return at once; `follow` will take what is ready. For engines that sample
    meanwhile: a user's own loop, a stock server; a run, which is on-policy, has nothing to sample while it syncs."""
    _discard(engine)
    engine.prefetched = Prefetch(engine, ref)


def follow(engine: FollowingSink[Any], ref: ArtifactRef) -> None:
    """Bring the engine to the policy version `ref`; a no-op when it is there.

    Every version on the way is verified by the digests of all changed tensors before the engine pauses for it. When this
    raises, the engine holds the last version that it came to, whole.
    """
    ready = engine.prefetched
    if ready is not None and (ready.ref, ready.version) == (ref, engine.version):
        engine.prefetched, way = None, ready.updates()
    else:
        _discard(engine)
        way = updates(engine, ref)
    for update, version in way:
        engine.commit(update, version)


def _discard(engine: FollowingSink[Any]) -> None:
    """What is still reading the engine's weights must have ended before they change."""
    if engine.prefetched is not None:
        engine.prefetched.wait()
        engine.prefetched = None


class _CannotTell(Exception):
    """The engine does not tell its own weights, so changes relative to them cannot be decoded."""


def updates(engine: FollowingSink[Any], ref: ArtifactRef) -> Iterator[tuple[Any, str]]:
    """Prepared updates and the digests of the versions that they lead to; each must be committed before the next. One to
    each version on the way, or one in all (`FollowingSink.loads_whole`).

    Should the engine not hold what it is taken to hold, or not tell, or the way be collected, it gets the whole version.
    """
    newest = describe(ref)
    if newest.adapter_config is not None:
        if not isinstance(engine, AdapterSink):
            raise BadInput(f"{ref.uri} is an adapter, and the engine takes none: policies of it are whole")
        if engine.version != newest.policy_digest:
            yield engine.prepare_adapter(dict(reader.read(ref)), newest.adapter_config), newest.policy_digest
        return
    path = reader.chain(ref, engine.version)
    if path and path[0][1].is_delta and path[0][1].base == engine.version:
        try:
            if engine.loads_whole and len(path) > 1:
                yield engine.prepare_whole(_folded(engine, path)), path[-1][1].policy_digest
                return
            for at, what in path:
                yield engine.prepare(list(decode(engine, at, what))), what.policy_digest
            return
        except _CannotTell:
            pass
        except (Corrupted, BadInput) as fault:  # BadInput: a version on the way was collected since
            _log.warning("the engine gets %s whole: %s", ref.uri, fault)
    if path:
        yield engine.prepare_whole(reader.read(ref)), path[-1][1].policy_digest


def _folded(engine: FollowingSink[Any], path: reader.Chain) -> "Iterator[tuple[str, torch.Tensor]]":
    """All tensors of the last version of a way that begins at the engine's; what changed is verified by its digest. Made in
    a scratch file."""
    from infra.policy.mirror import Mirror

    infos = path[-1][1].tensors
    mirror = Mirror({name: (dtype_of(info), info.shape) for name, info in infos.items()})
    for name, info in infos.items():
        if (found := engine.words(name, dtype_of(info))) is None:
            raise _CannotTell(name)
        mirror.words(name)[:] = found
    reader.advance(mirror, path)
    for name in {name for _, what in path for frame in what.frames or [] for name in frame.tensors}:
        if tensor_digest(mirror.tensor(name)) != infos[name].digest:
            raise Corrupted(f"tensor {name!r} of {path[-1][0].uri}, made of the engine's own, is not the committed one")
    for name in mirror.names:
        yield name, mirror.tensor(name)


def decode(
    engine: FollowingSink[Any], ref: ArtifactRef, what: PolicyVersion
) -> "Iterator[tuple[str, torch.dtype, Changes]]":
    """(name, dtype, what changes) of a delta to the engine's version, each tensor's result verified by its digest.

    Hashing goes on in threads; nothing is yielded of a version before all of it has been verified. One frame's tensors
    and a few that are being hashed are held.
    """
    olds: dict[str, ndarray] = {}

    def words(name: str) -> "ndarray":
        found = engine.words(name, dtype_of(what.tensors[name]))
        if found is None:
            raise _CannotTell(name)
        olds[name] = found
        return found

    checks: list[Future[None]] = []
    decoded: list[tuple[str, torch.dtype, Changes]] = []
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="verify") as pool:
        for name, changes in reader.changes(ref, what, words):
            info = what.tensors[name]
            while len(checks) >= 2 * _HASHERS:  # bounds the tensors that are held
                checks.pop(0).result()
            checks.append(pool.submit(_verify, name, olds.pop(name), changes, info, ref))
            decoded.append((name, dtype_of(info), changes))
        for check in checks:
            check.result()
    yield from decoded


def _verify(name: str, old: "ndarray", changes: "Changes", info: TensorInfo, ref: ArtifactRef) -> None:
    old[changes.positions] = changes.values  # a copy, and not needed any more
    if digest_of(memoryview(old).cast("B")) != info.digest:
        raise Corrupted(f"tensor {name!r} of {ref.uri}, made of the engine's own, is not the one that was committed")
