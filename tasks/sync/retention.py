"""Which policy versions stay in the store while a run goes on.

Kept are version 0, the last ones, those that a pin names (an engine that lags, an evaluation, a person), and every version
on the chains of deltas that lead to these. The trainer can make any other again from its checkpoints and the stored
batches.
"""

import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from infra import policy
from infra.artifacts import ArtifactRef
from infra.config import Config
from infra.errors import BadInput, Corrupted
from infra.run import Run
from infra.store import Store

_log = logging.getLogger(__name__)
_PINS = "pins"
LEASE_S = 900.0
"""Seconds that a pin of `holding` outlives its last renewal: what a killed process held is kept no longer."""
_FOLDER = re.compile(r"\d+/policy-[^/]+(?=/)")


class Pin(Config):
    """Keeps one version."""

    uri: str
    """Where the version lies, or will."""
    until: float | None = None
    """When the pin ends (seconds since the epoch); None: with `unpin`."""


def pin(run: Run, name: str, uri: str, seconds: float | None = None) -> None:
    """Keep the version at `uri`, for some seconds or (None) as long as the pin `name` names it; another version may be
    given to it later."""
    until = None if seconds is None else time.time() + seconds
    run.write_json(f"{_PINS}/{name}.json", Pin(uri=uri, until=until).model_dump())


def unpin(run: Run, name: str) -> None:
    """Drop a pin; a no-op when there is none."""
    Store.at(run.store).delete(f"runs/{run.name}/{_PINS}/{name}.json")


@contextmanager
def holding(run: Run, uri: str) -> Iterator[None]:
    """A pin while the block runs, renewed from a thread; should the process die, it ends after LEASE_S.

    To hold a version, pin it first, then look whether it is there: a collection that goes on meanwhile may have read the
    pins just before.
    """
    name, ended = f"held-{uuid.uuid4().hex[:16]}", threading.Event()

    def renew() -> None:
        while not ended.wait(LEASE_S / 4):
            try:
                pin(run, name, uri, LEASE_S)
            except Exception as fault:
                _log.warning("the pin of %s could not be renewed: %s", uri, fault)

    pin(run, name, uri, LEASE_S)
    thread = threading.Thread(target=renew, name="pin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        try:
            unpin(run, name)
        except Exception as fault:  # it ends by itself
            _log.warning("the pin of %s could not be dropped: %s", uri, fault)


def pinned(run: Run) -> set[str]:
    """Where the versions lie that pins name. Pins that have ended are deleted."""
    folder = Store.at(run.store) / f"runs/{run.name}/{_PINS}"
    uris = set[str]()
    for key in [key for key in folder.keys() if key.endswith(".json")]:
        with suppress(FileNotFoundError):  # dropped meanwhile
            found = Pin.model_validate_json(folder.read(key))
            if found.until is None or found.until > time.time():
                uris.add(found.uri)
            else:
                folder.delete(key)
    return uris


def drop_old_versions(run: Run, head: ArtifactRef, keep: int) -> list[str]:
    """Delete the versions of a run that nothing kept needs; returns their keys. The `keep` last up to `head` are kept.

    A manifest goes first: no manifest, no artifact. What a lagging list does not show yet, or a crash leaves, with or
    without a manifest, a later call finds. An upload that is going on is not touched: the trainer's are of versions above
    the oldest that is kept, and who makes an older one again pins it first.
    """
    recent = _last(head, keep)
    needed = {ref.uri for root in recent for ref in _lineage(root)}
    oldest = min(policy.describe(ref).version for ref in recent)
    steps = Store.at(run.store) / f"runs/{run.name}/steps"
    folders = {found[0] for key in steps.keys() if (found := _FOLDER.match(key))}
    dropped = []
    for folder in sorted(folders):
        uri, number = steps.uri(folder), int(folder.partition("/")[0])
        if not 0 < number < oldest or uri in needed or uri in _held(run):  # pins asked each time: others pin meanwhile
            continue
        steps.delete(f"{folder}/manifest.json")
        steps.delete(folder)
        dropped.append(folder)
    return dropped


def _held(run: Run) -> set[str]:
    """Where the versions lie that pins keep: those that they name, and what these are made of."""
    uris = pinned(run)
    for uri in list(uris):
        parent, _, leaf = uri.rpartition("/")
        if (ref := Store.at(parent).find(leaf)) is not None:
            uris |= {at.uri for at in _lineage(ref)}
    return uris


def _last(head: ArtifactRef, count: int) -> list[ArtifactRef]:
    """`head` and its parents, at most `count`."""
    versions = [head]
    while len(versions) < count and (parent := policy.describe(versions[-1]).parent) is not None:
        if not _is_there(parent):
            break
        versions.append(parent)
    return versions


def _lineage(ref: ArtifactRef) -> list[ArtifactRef]:
    """The versions that reading `ref` may need: itself and its parents, back to one that holds all tensors."""
    lineage: list[ArtifactRef] = []
    at: ArtifactRef | None = ref
    while at is not None and _is_there(at):
        lineage.append(at)
        what = policy.describe(at)
        at = None if what.is_full else what.parent
    return lineage


def _is_there(ref: ArtifactRef) -> bool:
    """Whether the version is in the store; not if it was collected, even if another was put in its place since."""
    try:
        policy.describe(ref)
    except (BadInput, Corrupted):
        return False
    return True
