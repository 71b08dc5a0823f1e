"""Immutable artifacts: data files, then a manifest, written last by a conditional put. No manifest, no artifact.

A writer puts its files in a folder of its own below the key, so racing writers never touch each other's; the first
manifest wins and names the folder that counts. Writers of big files that come out equal when they are made again share
them instead (`resumable`): a file's name holds its digest, so that what is there is what would be written. Deleted
artifacts leave a tombstone (infra/storage/tombstones.py). Data is Parquet, safetensors, JSON or plain bytes: nothing read from a
store is ever unpickled.
"""

import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from infra.errors import BadInput, Corrupted, Missing, Replaced, Transient
from infra.storage import links, tombstones
from infra.storage.backend import Buffer, Sink
from infra.storage.manifest import (
    MANIFEST,
    SHARED,
    ArtifactRef,
    FileEntry,
    Manifest,
    Written,
    canonical,
    digest_of,
    name_digest,
    place,
)
from infra.storage.store import Store, check_key

if TYPE_CHECKING:  # both are slow to import, and a flow only passes refs
    import pyarrow as pa
    from torch import Tensor

__all__ = ["Artifact", "ArtifactRef", "ArtifactWriter", "Manifest", "Store", "digest_of", "open_artifact"]

_log = logging.getLogger(__name__)


class ArtifactWriter:
    """A with-block that writes one artifact; `ref` is set when the block has ended well.

    An exception inside the block leaves nothing visible. When another writer was first, `ref` is that writer's, and
    `adopted` is True. `metadata` and `provenance` may be filled in until the block ends. Files are made durable in the background
    while the next one is written; the manifest waits for all of them.

    `resumable`: a writer that failed or died leaves its files, and the next one of the key, in whatever process, does not
    write again what lies there whole. For `bytes`, `json` and `tensors`. A file is hashed before it is written. Several
    processes may each write files of one such artifact, with a writer outside of a with-block (`written`, then `close`);
    one commits them all (`include`). Transient when the key was deleted after the writer was made, with the files that it
    counted on.
    """

    ref: ArtifactRef
    adopted: bool = False

    def __init__(
        self,
        store: Store,
        key: str,
        kind: str,
        *,
        inputs: Sequence[ArtifactRef] = (),
        config_hash: str = "",
        metadata: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        schema_version: int = 1,
        resumable: bool = False,
    ):
        self.store, self._root = store / key, store.url
        self.kind, self.schema_version = kind, schema_version
        self.inputs, self.config_hash = list(inputs), config_hash
        self.metadata = dict(metadata or {})
        self.provenance = provenance if provenance is not None else {}
        self.resumable = resumable
        self.folder = f"files-{uuid.uuid4().hex[:16]}"
        self._before: bytes | None = None  # the manifest comes after this, or not at all
        if resumable:
            self._before = tombstones.find(self.store)
            self.folder = tombstones.shared_folder(self._before)
        self._files: dict[str, FileEntry] = {}
        self._shared: list[str] = []  # keys of shared files that this one wrote
        self._closing: list[Future[None]] = []
        self._is_garbage = True
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="artifact")

    def bytes(self, name: str, data: Buffer) -> None:
        """A file of any content. `name` is its full name."""
        self._put(name, [data])

    def json(self, name: str, value: Any) -> None:
        """`name`.json, with sorted keys; refs in it may move with the store. NaN and infinity are BadInput: JSON has no such
        numbers."""
        self.bytes(f"{name}.json", canonical(links.map_refs(value, self._link), indent=1))

    def table(self, name: str, table: "pa.Table") -> None:
        """`name`.parquet. Equal tables give equal bytes, however they are chunked; schema metadata is not kept."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = table.replace_schema_metadata(None).combine_chunks()
        with self._file(f"{name}.parquet") as file:
            pq.write_table(table, pa.PythonFile(file, mode="w"), compression="zstd", compression_level=1)

    def tensors(
        self, name: str, tensors: "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]", shard_bytes: int | None = None
    ) -> dict[str, str]:
        """`name`-00000.safetensors, -00001, ...: files of at most `shard_bytes` (256 MiB), or of one bigger tensor.

        Takes tensors of any device and strides; an iterator's are held until their shard is written, so it must not
        reuse their memory. Returns tensor name -> file name.
        """
        from infra.storage.safetensors import SHARD_BYTES, shards, write_safetensors

        where: dict[str, str] = {}
        for i, group in enumerate(shards(tensors, shard_bytes or SHARD_BYTES)):
            file_name = f"{name}-{i:05d}.safetensors"
            pieces: list[Buffer] = []
            write_safetensors(group, pieces.append)
            self._put(file_name, pieces)
            where.update(dict.fromkeys(group, file_name))
        return where

    def written(self) -> Written:
        """What has been written until now, made durable."""
        for future in self._closing:
            future.result()
        return Written(list(self._files.values()), list(self._shared), self.folder)

    def include(self, other: Written) -> None:
        """Commit another process's files with this one's. Both are `resumable`."""
        if other.files and other.folder != self.folder:
            raise self._deleted()
        for entry in other.files:
            self._check(entry.name)
            self._files[entry.name] = entry
        self._shared += other.keys

    def close(self) -> None:
        """End a writer that commits nothing."""
        self._pool.shutdown(wait=True)

    def _put(self, name: str, pieces: Sequence[Buffer]) -> None:
        if self.resumable:
            self._share(name, pieces)
            return
        with self._file(name) as file:
            for piece in pieces:
                file.write(piece)

    def _share(self, name: str, pieces: Sequence[Buffer]) -> None:
        """Write a file unless it is there: written by one that died, or just now by another."""
        self._check(name)
        hasher, size = blake3(max_threads=blake3.AUTO), 0
        for piece in pieces:
            hasher.update(piece)
            size += len(piece)
        entry = FileEntry(name=name, bytes=size, digest=name_digest(hasher))
        key = place(self.folder, entry)
        self._files[name] = entry
        if self.store.size(key) == size:
            return
        try:
            sink = self.store.open(key)
        except FileExistsError:
            return
        try:
            for piece in pieces:
                sink.write(piece)
        except BaseException:
            with suppress(Exception):
                sink.abort()
            raise
        self._shared.append(key)
        self._closing.append(self._pool.submit(sink.close))

    def _check(self, name: str) -> None:
        check_key(name)
        if name in self._files:
            raise BadInput(f"{self.store.url}: file {name!r} is written twice")

    def _file(self, name: str) -> "_HashingFile":
        self._check(name)
        return _HashingFile(self, name, self.store.open(f"{self.folder}/{name}"))

    def _written(self, entry: FileEntry, sink: Sink) -> None:
        self._files[entry.name] = entry
        self._closing.append(self._pool.submit(sink.close))

    def __enter__(self) -> "ArtifactWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        try:
            if error is None:
                self._commit()
                return False
            # A racing writer that has won sweeps the others' files, maybe while they are being written.
            return isinstance(error, FileNotFoundError) and self._swept(error)
        except FileNotFoundError as missing:
            if not self._swept(missing):
                raise
            return False
        finally:
            self.close()
            # Garbage is invisible; the first fault is what matters. Another may count on shared files: they stay.
            if self._is_garbage and not self.resumable:
                with suppress(Exception):
                    self.store.delete(self.folder)

    def _commit(self) -> None:
        if self.resumable and not self._files:
            self.bytes("empty", b"")  # a key with nothing but manifest.json is known for a tombstone's by a list alone
        self.written()
        manifest = Manifest(
            kind=self.kind,
            schema_version=self.schema_version,
            files=sorted(self._files.values(), key=lambda entry: entry.name),
            inputs=[self._link(ref) for ref in self.inputs],
            config_hash=self.config_hash,
            metadata=self.metadata,
            provenance={**_provenance(), **self.provenance},
            folder=self.folder,
        )
        data = manifest.encode()
        self._is_garbage = False  # a put that raises may have arrived: the files must stay until it is known
        if self.store.replace(MANIFEST, data, expected=self._before):
            self.ref = ArtifactRef(kind=self.kind, uri=self.store.url, digest=manifest.digest)
            self._sweep(manifest.places)
            return
        winner = self._adopt()
        if winner is None:
            raise self._deleted()
        if winner.digest != manifest.digest:
            _log.warning("%s was written first by another writer, with other content; that one counts", self.store.url)

    def _link(self, ref: ArtifactRef) -> ArtifactRef:
        """The ref as the artifact names it."""
        return ref.model_copy(update={"uri": links.relative(ref.uri, self.store.url, self._root)})

    def _swept(self, missing: FileNotFoundError) -> bool:
        """Whether another's commit is why something is missing: that is adopted. Transient when a collection is."""
        if self._adopt() is not None:
            return True
        if self.resumable and tombstones.find(self.store) != self._before:
            raise self._deleted() from missing
        return False

    def _deleted(self) -> Transient:
        return Transient(f"{self.store.url} was deleted while it was written, and what had been written of it")

    def _adopt(self) -> Manifest | None:
        """Take the artifact of the writer that was first as this one's; None when there is none."""
        winner = _read_manifest(self.store)
        if winner is not None:
            # It may be this one's own: the put's reply was lost, and the manifest was touched since.
            self._is_garbage, self.adopted = winner.folder != self.folder, True
            # Whoever else is writing will find the manifest too: nobody can need the others any more.
            kept = winner.places
            for key in self._shared:
                if key not in kept:
                    with suppress(Exception):
                        self.store.delete(key)
            self.ref = ArtifactRef(kind=winner.kind, uri=self.store.url, digest=winner.digest)
        return winner

    def _sweep(self, kept: set[str]) -> None:
        """Drop what writers that died, or will lose, left under this key."""
        with suppress(Exception):
            keys, uploads = self.store.keys(""), self.store.uploads("")
            folders = {key.partition("/")[0] for key in [*keys, *uploads]}
            for folder in folders - {self.folder}:
                if folder.startswith("files-"):
                    self.store.delete(folder)
            for key in keys:  # of no later life of the key: this may come late
                if key.partition("/")[0] in {self.folder, SHARED} and key not in kept:
                    self.store.delete(key)
            for key in uploads:
                if key.partition("/")[0] in {self.folder, SHARED}:
                    self.store.abort(key)


class _HashingFile:
    """A sink that hashes what passes. Closing it registers the file with its writer; an error drops it."""

    closed = False

    def __init__(self, writer: ArtifactWriter, name: str, sink: Sink):
        self._writer, self._name, self._sink = writer, name, sink
        self._hasher, self._bytes = blake3(max_threads=blake3.AUTO), 0

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        self._bytes += len(view)
        self._sink.write(view)
        return len(view)

    def flush(self) -> None:
        pass

    def __enter__(self) -> "_HashingFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            entry = FileEntry(name=self._name, bytes=self._bytes, digest=name_digest(self._hasher))
            self._writer._written(entry, self._sink)
            return
        with suppress(Exception):
            self._sink.abort()


class Artifact:
    """A committed artifact. Every file's size and digest are checked before any of its bytes are used."""

    def __init__(self, ref: ArtifactRef, manifest: Manifest):
        self.ref, self.manifest = ref, manifest
        self.store = Store.at(ref.uri)

    @property
    def metadata(self) -> dict[str, Any]:
        """The manifest's facts about the content."""
        return self.manifest.metadata

    @property
    def names(self) -> list[str]:
        """Full names of the files, sorted."""
        return [entry.name for entry in self.manifest.files]

    def bytes(self, name: str) -> bytes:
        """The file `name`. BadInput when there is none, Corrupted when it is not what was written."""
        return bytes(self.buffer(name))

    def json(self, name: str) -> Any:
        """The value of `name`.json."""
        value = json.loads(bytes(self.buffer(f"{name}.json")))
        return links.map_refs(value, lambda ref: resolve(ref, self.ref.uri))

    def table(self, name: str) -> "pa.Table":
        """The rows of `name`.parquet."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        return pq.read_table(pa.BufferReader(pa.py_buffer(self.buffer(f"{name}.parquet"))))

    def tensors(self, name: str) -> "dict[str, Tensor]":
        """All tensors written under `name`, by name."""
        return dict(self.iter_tensors(name))

    def iter_tensors(self, name: str) -> "Iterator[tuple[str, Tensor]]":
        """The tensors written under `name`, one shard in memory at a time.

        They are views of the file (mapped copy-on-write for file://): no copy is made, and writing to one never
        changes the artifact.
        """
        from infra.storage.safetensors import read_safetensors

        files = [n for n in self.names if n.startswith(f"{name}-") and n.endswith(".safetensors")]
        if not files:
            raise BadInput(f"{self.ref.uri} has no tensors {name!r}; its files: {self.names}")
        for file in files:
            yield from read_safetensors(self.buffer(file))

    def buffer(self, name: str) -> Buffer:
        """The checked bytes of the file `name`, without a copy where the store allows."""
        entry = next((entry for entry in self.manifest.files if entry.name == name), None)
        if entry is None:
            raise BadInput(f"{self.ref.uri} has no file {name!r}; its files: {self.names}")
        try:
            data = self.store.buffer(self.manifest.place(name))
        except FileNotFoundError as error:
            open_artifact(self.ref)  # Missing: it was deleted since
            raise Corrupted(f"{name} of {self.ref.uri} is missing") from error
        if len(data) != entry.bytes:
            raise Corrupted(f"{name} of {self.ref.uri} is damaged: {len(data)} bytes, {entry.bytes} were written")
        if digest_of(data) != entry.digest:
            raise Corrupted(f"{name} of {self.ref.uri} is damaged: its content does not fit its digest")
        return data


def open_artifact(ref: ArtifactRef) -> Artifact:
    """Reads the manifest. Missing when there is no such artifact, Replaced when it is not the one referred to."""
    manifest = _read_manifest(Store.at(ref.uri))
    if manifest is None:
        raise Missing(f"there is no artifact at {ref.uri}")
    if manifest.digest != ref.digest or manifest.kind != ref.kind:
        raise Replaced(
            f"{ref.uri}/{MANIFEST} is another artifact than the ref's: {manifest.kind} {manifest.digest}, expected "
            f"{ref.kind} {ref.digest}"
        )
    inputs = [resolve(one, ref.uri) for one in manifest.inputs]
    return Artifact(ref, manifest.model_copy(update={"inputs": inputs}))


def find_artifact(store: Store, key: str) -> ArtifactRef | None:
    """The ref of the artifact `key` of `store`, None when there is none."""
    store = store / key
    manifest = _read_manifest(store)
    return ArtifactRef(kind=manifest.kind, uri=store.url, digest=manifest.digest) if manifest else None


def resolve(ref: ArtifactRef, folder: str, root: str | None = None) -> ArtifactRef:
    """A ref as the folder (a URL) holds it -> with the absolute URI. `root`: of the folder's store, if it is known.

    An absolute URI that leads out of the store was perhaps written before the store moved: where the same artifact lies at
    the same key of this one, that is meant.
    """
    if "://" in ref.uri:
        here = links.moved(ref.uri, root or links.root_of(folder))
        found = _read_manifest(Store.at(here)) if here else None
        return ref.model_copy(update={"uri": here}) if found and found.digest == ref.digest else ref
    return ref.model_copy(update={"uri": links.absolute(ref.uri, folder)})


def _read_manifest(store: Store) -> Manifest | None:
    """As it is stored: its inputs are not resolved."""
    data = tombstones.state(store)
    return None if data is None or tombstones.is_tombstone(data) else Manifest.decode(data, store.url)


def _provenance() -> dict[str, Any]:
    try:
        code_version = version("policyflow")
    except PackageNotFoundError:
        code_version = "unknown"
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"created": created, "code_version": code_version, "host": platform.node(), "pid": os.getpid()}
