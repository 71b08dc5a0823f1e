"""Which policy versions stay in the store while a run goes on.

Kept are version 0, the last ones, those that a pin names (an engine that lags, an evaluation, a person), and every version
on the chains of deltas that lead to these. The trainer can make any other again from its checkpoints and the stored
batches.

Who pins a version writes the pin, then touches the manifests of all that it is made of. A collection reads a version's
manifest, then the pins, then swaps the manifest for a tombstone: it sees the pin, or the swap fails. Only then are files
deleted (infra/storage/tombstones.py).
"""

import json
import logging
import re
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infra.config import Config
from infra.errors import Corrupted, Missing, Replaced
from infra.policy.version import PolicyVersion, describe
from infra.runs.run import Run
from infra.storage import links, tombstones
from infra.storage.artifacts import ArtifactRef, find_artifact
from infra.storage.manifest import MANIFEST
from infra.storage.store import Store

_log = logging.getLogger(__name__)
_PINS = "pins.json"
"""All pins of a run, by name: one object, since a list of several may lag, and one of them would be missed."""
LEASE_S = 900.0
"""Seconds that a pin of `holding` outlives its last renewal: what a killed process held is kept no longer."""
_FOLDER = re.compile(r"(\d+/policy-[^/]+)/([^/]+)")


class Pin(Config):
    """Keeps one version."""

    uri: str
    """Where the version lies, or will; in the store relative to the run's folder."""
    until: float | None = None
    """When the pin ends (seconds since the epoch); None: with `unpin`."""


def pin(run: Run, name: str, uri: str, seconds: float | None = None) -> ArtifactRef | None:
    """Keep the version at `uri`, for some seconds or (None) as long as the pin `name` names it; another version may be
    given to it later.

    Returns the version, which stays now and can be read; None when it is not there (any more): then it stays when
    somebody makes it. A collection that goes on meanwhile changes nothing of this.
    """
    until = None if seconds is None else time.time() + seconds
    _change(run, lambda pins: pins | {name: Pin(uri=uri, until=until)})
    while (ref := _find(uri)) is not None:
        lineage, lost = _lineage(ref)
        if lost is None:
            if all(map(tombstones.touch, lineage)):
                return ref
        elif _find(lost.uri) != lost:
            tombstones.bury_artifact(ref)  # nobody can read it: who makes it again must not find it
    return None


def unpin(run: Run, name: str) -> None:
    """Drop a pin; a no-op when there is none."""
    _change(run, lambda pins: {other: found for other, found in pins.items() if other != name})


@contextmanager
def holding(run: Run, uri: str) -> Iterator[ArtifactRef | None]:
    """A pin while the block runs, and what `pin` returns; renewed from a thread. Should the process die, it ends after
    LEASE_S."""
    name, ended = f"held-{uuid.uuid4().hex[:16]}", threading.Event()

    def renew() -> None:
        while not ended.wait(LEASE_S / 4):
            try:
                pin(run, name, uri, LEASE_S)
            except Exception as fault:
                _log.warning("the pin of %s could not be renewed: %s", uri, fault)

    found = pin(run, name, uri, LEASE_S)
    thread = threading.Thread(target=renew, name="pin", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        try:
            unpin(run, name)
        except Exception as fault:  # it ends by itself
            _log.warning("the pin of %s could not be dropped: %s", uri, fault)


def pinned(run: Run) -> set[str]:
    """Where the versions lie that pins name."""
    return {found.uri for found in _pins(run)[1].values()}


def _pins(run: Run) -> tuple[bytes | None, dict[str, Pin]]:
    """The object that holds the pins, None before the first; and those that have not ended."""
    try:
        data = Store.at(run.store).read(f"runs/{run.name}/{_PINS}")
    except FileNotFoundError:
        return None, {}
    root = Store.at(run.store).url
    pins = {name: Pin.model_validate(found) for name, found in json.loads(data).items()}
    for name, found in pins.items():
        uri = links.absolute(found.uri, run.folder)
        pins[name] = found.model_copy(update={"uri": links.moved(uri, root) or uri})  # a run pins its own versions
    return data, {name: found for name, found in pins.items() if found.until is None or found.until > time.time()}


def _change(run: Run, change: Callable[[dict[str, Pin]], dict[str, Pin]]) -> None:
    """Change the pins, by compare-and-swap: others do, too. Those that have ended go."""
    while True:
        before, pins = _pins(run)
        if (after := change(pins)) == pins:
            return
        root, written = Store.at(run.store).url, {name: found.model_dump() for name, found in after.items()}
        for found in written.values():
            found["uri"] = links.relative(found["uri"], run.folder, root)
        data = json.dumps(written, indent=1).encode()
        if Store.at(run.store).replace(f"runs/{run.name}/{_PINS}", data, expected=before):
            return


def drop_old_versions(run: Run, head: ArtifactRef, keep: int) -> list[str]:
    """Delete the versions of a run that nothing kept needs; returns their keys. The `keep` last up to `head` are kept.

    A tombstone of some bytes is left of each. What a lagging list does not show yet, or a crash leaves, with or without
    a manifest, a later call finds. Who is uploading such a version, cut off from the store long ago, is told when it
    comes to its manifest (Transient); who makes one again pins it first.
    """
    recent = _last(head, keep)
    needed = set[str]()
    for root in recent:
        lineage, lost = _lineage(root)
        if lost is not None:
            raise Corrupted(f"{lost.uri}, which {root.uri} is made of, is not in the store; nothing is collected")
        needed |= {ref.uri for ref in lineage}
    oldest = min(describe(ref).version for ref in recent)
    steps = Store.at(run.store) / f"runs/{run.name}/steps"
    folders = defaultdict[str, set[str]](set)
    # Before any state is read: what is deleted must not be of a later life.
    for key in [*steps.keys(), *steps.uploads()]:
        if found := _FOLDER.match(key):
            folders[found[1]].add(found[2])
    dropped = []
    for folder, names in sorted(folders.items(), reverse=True):  # no version stays whose parents go
        uri, number = steps.uri(folder), int(folder.partition("/")[0])
        if not 0 < number < oldest or uri in needed or names == {MANIFEST}:
            continue
        before = tombstones.state(steps / folder)
        needed |= _held(run)  # asked each time, after the state: others pin meanwhile
        if uri in needed or not tombstones.bury(steps / folder, before):
            continue
        for name in names - {MANIFEST}:
            steps.delete(f"{folder}/{name}")
        dropped.append(folder)
    return dropped


def _held(run: Run) -> set[str]:
    """Where the versions lie that pins keep: those that they name, and what these are made of."""
    uris = pinned(run)
    for uri in list(uris):
        if (ref := _find(uri)) is not None:
            uris |= {at.uri for at in _lineage(ref)[0]}
    return uris


def _find(uri: str) -> ArtifactRef | None:
    parent, _, leaf = uri.rpartition("/")
    return find_artifact(Store.at(parent), leaf)


def _last(head: ArtifactRef, count: int) -> list[ArtifactRef]:
    """`head` and its parents, at most `count`."""
    versions = [head]
    while len(versions) < count and (parent := describe(versions[-1]).parent) is not None:
        if _described(parent) is None:
            break
        versions.append(parent)
    return versions


def _lineage(ref: ArtifactRef) -> tuple[list[ArtifactRef], ArtifactRef | None]:
    """The versions that reading `ref` may need, itself and its parents, back to one that holds all tensors; and the first
    that is not in the store, None when all are."""
    lineage: list[ArtifactRef] = []
    at: ArtifactRef | None = ref
    while at is not None:
        if (what := _described(at)) is None:
            return lineage, at
        lineage.append(at)
        at = None if what.is_full else what.parent
    return lineage, None


def _described(ref: ArtifactRef) -> PolicyVersion | None:
    """What the version is; None when it was collected, even if another was put in its place since."""
    try:
        return describe(ref)
    except (Missing, Replaced):  # no other fault: what is needed would be deleted for a store that refuses once
        return None
