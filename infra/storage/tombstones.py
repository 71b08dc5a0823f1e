"""The end of an artifact, and of uploads under its key: who comes late, however late, does no harm.

manifest.json decides, by compare-and-swap: absent -> manifest -> tombstone -> manifest -> ..., and never absent again. A
tombstone has a token, and who writes the artifact after it puts the files in a folder of that name. So what a collection
deletes that was suspended for hours is of an earlier life of the key, and a writer that was cut off meanwhile cannot
commit what it had written: its manifest would have had to come before the tombstone.
"""

import re
import uuid

from infra.storage.manifest import MANIFEST, SHARED, ArtifactRef, Manifest
from infra.storage.store import Store

_TOMBSTONE = re.compile(rb'\{"deleted": "([0-9a-f]{16})"\}\n')


def state(store: Store) -> bytes | None:
    """What decides over the artifact at `store`: its manifest, a tombstone, None before either."""
    try:
        return bytes(store.read(MANIFEST))
    except FileNotFoundError:
        return None


def find(store: Store) -> bytes | None:
    """The tombstone at `store`, None when there is none: an artifact, or nothing yet."""
    data = state(store)
    return data if data is not None and is_tombstone(data) else None


def is_tombstone(data: bytes) -> bool:
    """Whether the artifact that had been there was deleted."""
    return _TOMBSTONE.fullmatch(data) is not None


def shared_folder(before: bytes | None) -> str:
    """Where writers that share files put them, after the tombstone `before` or without one."""
    buried = _TOMBSTONE.fullmatch(before) if before else None
    return f"{SHARED}-{buried.group(1).decode()}" if buried else SHARED


def bury(store: Store, before: bytes | None) -> bool:
    """Delete the artifact, or what is being uploaded, at `store`, if the state still is `before`; else False. All files that
    were there at that state may be deleted then, at any time."""
    return store.replace(MANIFEST, b'{"deleted": "%s"}\n' % uuid.uuid4().hex[:16].encode(), expected=before)


def bury_artifact(ref: ArtifactRef) -> None:
    """Delete an artifact, unless another has its place."""
    store = Store.at(ref.uri)
    while _manifest(data := state(store), ref) is not None and not bury(store, data):
        pass  # it was touched


def touch(ref: ArtifactRef) -> bool:
    """Write the artifact's manifest anew, with other bytes: a `bury` of what was there before will fail. False when the
    artifact is not there. Its content and digest stay the same."""
    store = Store.at(ref.uri)
    while (manifest := _manifest(data := state(store), ref)) is not None:
        provenance = manifest.provenance | {"touched": uuid.uuid4().hex[:16]}
        if store.replace(MANIFEST, manifest.model_copy(update={"provenance": provenance}).encode(), expected=data):
            return True
    return False


def _manifest(data: bytes | None, ref: ArtifactRef) -> Manifest | None:
    """`data` as the manifest of `ref`, None when it is not that."""
    if data is None or is_tombstone(data):
        return None
    manifest = Manifest.decode(data, ref.uri)
    return manifest if manifest.digest == ref.digest else None
