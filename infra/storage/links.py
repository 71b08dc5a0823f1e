"""Refs as a store holds them: relative to the folder of what holds them, so that a store may move.

In memory a ref says absolutely where its artifact lies. A manifest's inputs, and JSON of a run or in an artifact, name
what lies in the same store by a relative path, as links of a web page do; what lies elsewhere stays absolute. Stores of
before have absolute paths only: `moved` finds what they name where the store is now.
"""

import posixpath
import re
from collections.abc import Callable
from typing import Any

from infra.storage.manifest import ArtifactRef

_LAYOUT = re.compile(r"(.+)/((?:runs/[^/]+/(?:steps/\d+|checkpoints)|datasets)/[^/]+)")
"""Root and key of an artifact of a flow's (infra/runs/run.py)."""


def relative(uri: str, folder: str, root: str) -> str:
    """How what lies in the folder (a URL) of a store names a URI: relative, if that is in the store, too."""
    if not uri.startswith(f"{root.rstrip('/')}/"):
        return uri
    path, start = (f"/{url.partition('://')[2].strip('/')}" for url in (uri, folder))
    return posixpath.relpath(path, start)


def absolute(uri: str, folder: str) -> str:
    """The URI that something in the folder names; the reverse of `relative`, wherever the store has moved."""
    if "://" in uri:
        return uri
    scheme, _, path = folder.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(path, uri))}"


def root_of(uri: str) -> str | None:
    """Root of the store that an artifact of a flow's lies in; None for other artifacts."""
    found = _LAYOUT.fullmatch(uri)
    return found[1] if found else None


def moved(uri: str, root: str | None) -> str | None:
    """Where an absolute URI leads if the store that it names has moved to `root`; None if it cannot have."""
    found = _LAYOUT.fullmatch(uri)
    return f"{root}/{found[2]}" if found and root and found[1] != root else None


def map_refs(value: Any, change: Callable[[ArtifactRef], ArtifactRef]) -> Any:
    """A JSON value with every ref in it changed."""
    if isinstance(value, dict):
        if value.keys() == ArtifactRef.model_fields.keys():
            return change(ArtifactRef.model_validate(value)).model_dump(mode="json")
        return {name: map_refs(one, change) for name, one in value.items()}
    if isinstance(value, list):
        return [map_refs(one, change) for one in value]
    return value
