"""The small JSON of an artifact: the ref that tasks pass, and the manifest, with BLAKE3 digests.

BLAKE3 hashes at memory speed on all cores, SHA-256 at a few hundred MB/s where the CPU has no instructions for it. The
algorithm is part of every digest ("blake3:...").
"""

import json
from functools import cached_property
from typing import Any, Literal, NamedTuple

from blake3 import blake3
from pydantic import BaseModel

from infra.config import Config
from infra.errors import BadInput, Corrupted
from infra.storage.backend import Buffer

MANIFEST = "manifest.json"
SHARED = "shared"
"""The folder of writers that share files, and what such folders' names begin with (infra/storage/tombstones.py): a file's name
there begins with its digest."""
_SEVERAL_CORES_FROM = 2**20  # bytes; below this, starting threads costs more than it saves


class Frozen(BaseModel):
    """An immutable value. Not a Config: it may have a field called digest."""

    model_config = Config.model_config


class ArtifactRef(Frozen):
    """What tasks pass to each other in place of data."""

    kind: str
    """What it is: prompts, rollouts, scored, policy, checkpoint, ..."""
    uri: str
    """The artifact's folder: file:///... or s3://..., never with credentials."""
    digest: str
    """`blake3:<hex>` of everything that the artifact says but its provenance and place: equal runs, equal digests."""


class FileEntry(Frozen):
    """One data file of an artifact."""

    name: str
    """Name within the artifact."""
    bytes: int
    """Size."""
    digest: str
    """`blake3:<hex>` of the content."""


class Written(NamedTuple):
    """Files of an artifact that is not committed yet; small, to be sent to the process that will commit it."""

    files: list[FileEntry]
    keys: list[str]
    """Of shared ones that were not there before, in the artifact's folder of the store."""
    folder: str = ""
    """Where they lie there."""


class Manifest(Frozen):
    """manifest.json: all there is to know of an artifact without reading its data."""

    format: Literal["policyflow-artifact-1"] = "policyflow-artifact-1"
    """Version of this layout."""
    kind: str
    """As in the ref."""
    schema_version: int = 1
    """Version of the kind's own layout."""
    files: list[FileEntry]
    """Sorted by name."""
    inputs: list[ArtifactRef] = []
    """What it was made from; the digest covers their kinds and digests, not where they lay."""
    config_hash: str = ""
    """Digest of the settings that made it."""
    metadata: dict[str, Any] = {}
    """Facts about the content, JSON; part of the digest."""
    provenance: dict[str, Any] = {}
    """When, where and by what code it was made; not part of the digest."""
    folder: str
    """Where the files lie, below the artifact's key; not part of the digest."""

    @cached_property
    def digest(self) -> str:
        """`ArtifactRef.digest`."""
        content = self.model_dump(mode="json", exclude={"provenance", "folder"})
        content["inputs"] = [{"kind": ref.kind, "digest": ref.digest} for ref in self.inputs]
        return digest_of(canonical(content))

    def place(self, name: str) -> str:
        """Where the file `name` lies, below the artifact's key. KeyError when there is none."""
        return place(self.folder, {entry.name: entry for entry in self.files}[name])

    @property
    def places(self) -> set[str]:
        """Where all files lie."""
        return {place(self.folder, entry) for entry in self.files}

    def encode(self) -> bytes:
        """The manifest's JSON, sealed: its last line has the digest of all bytes before, so any changed byte is found."""
        body = canonical(self.model_dump(mode="json"), indent=1).removesuffix(b"\n}")
        return body + _seal(body)

    @classmethod
    def decode(cls, data: bytes, uri: str) -> "Manifest":
        """Raises Corrupted."""
        body = data[: -len(_seal(b""))]
        if data != body + _seal(body):
            raise Corrupted(f"{uri}/{MANIFEST} is damaged: its seal does not fit its content")
        try:
            content = json.loads(data)
            content.pop("seal")
            return cls.model_validate(content)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise Corrupted(f"{uri}/{MANIFEST} is damaged: {error}") from error


def _seal(body: bytes) -> bytes:
    return f',\n "seal": "{digest_of(body)}"\n}}'.encode()


def place(folder: str, entry: FileEntry) -> str:
    """Where a writer with this folder puts a file, below the artifact's key."""
    prefix = f"{entry.digest.removeprefix('blake3:')[:32]}-" if folder.startswith(SHARED) else ""
    return f"{folder}/{prefix}{entry.name}"


def digest_of(data: Buffer) -> str:
    """`blake3:<hex>` of bytes."""
    return name_digest(_hash(data))


def canonical(value: Any, indent: int | None = None) -> bytes:
    """The one spelling of a JSON value. BadInput for what JSON cannot hold, NaN and infinity included."""
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        text = json.dumps(value, sort_keys=True, indent=indent, separators=separators, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise BadInput(f"not a JSON value: {error}") from error
    return text.encode()


def _hash(data: Buffer) -> "blake3":
    return blake3(data, max_threads=blake3.AUTO if len(data) >= _SEVERAL_CORES_FROM else 1)


def name_digest(hasher: "blake3") -> str:
    """`blake3:<hex>` of what the hasher has seen."""
    return f"blake3:{hasher.hexdigest()}"
