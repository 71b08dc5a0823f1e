"""What a task relies on: an artifact is whole or absent, says the same for the same content, and cannot rot unseen."""

import json
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from infra.errors import BadInput, Corrupted
from infra.numerics.tensors import DTYPES
from infra.storage.artifacts import ArtifactRef, ArtifactWriter, Store, find_artifact, open_artifact
from infra.storage.files import Files

TABLE = pa.table({"a": list(range(50)), "b": [str(i) for i in range(50)]})
TENSORS = {
    "norm": torch.arange(7, dtype=torch.float32),
    "w": torch.randn(4, 6).bfloat16(),
    "odd": torch.ones(3, dtype=torch.uint8),
    "fp8": torch.randn(5).to(torch.float8_e4m3fn),
    "transposed": torch.arange(6).reshape(2, 3).T,
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
}


def write(store: Store, key: str = "run/x", **arguments: Any) -> ArtifactRef:
    with ArtifactWriter(store, key, "sample", metadata={"n": 1}, **arguments) as w:
        fill(w)
    return w.ref


def fill(w: ArtifactWriter) -> None:
    w.table("rows", TABLE)
    w.tensors("model", TENSORS, shard_bytes=40)
    w.json("facts", {"b": 1, "a": [1.5, None]})
    w.bytes("raw.bin", b"raw")


def read_all(ref: ArtifactRef) -> None:
    artifact = open_artifact(ref)
    for name in artifact.names:
        artifact.bytes(name)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    def bits(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def test_everything_written_is_read_back(file_store: Store) -> None:
    artifact = open_artifact(write(file_store))
    assert artifact.table("rows").equals(TABLE)
    assert artifact.json("facts") == {"a": [1.5, None], "b": 1}
    assert artifact.bytes("raw.bin") == b"raw"
    assert artifact.metadata == {"n": 1}
    tensors = artifact.tensors("model")
    assert tensors.keys() == TENSORS.keys()
    assert all(same(tensors[name], TENSORS[name]) for name in TENSORS)


def test_shards_are_standard_safetensors(file_store: Store) -> None:
    artifact = open_artifact(write(file_store))
    files = [name for name in artifact.names if name.endswith(".safetensors")]
    assert len(files) > 1
    loaded: dict[str, torch.Tensor] = {}
    for name in files:
        loaded |= load_file(artifact.store.path(f"{artifact.manifest.folder}/{name}"))
    assert all(same(loaded[name], TENSORS[name]) for name in TENSORS)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 4), max_size=3)), max_size=6),
    st.integers(1, 200),
)
def test_tensors_of_any_dtype_and_shape_keep_their_bits(
    file_store: Store, kinds: list[tuple[torch.dtype, list[int]]], shard_bytes: int
) -> None:
    file_store.delete("x")
    noise = random.Random(0)
    tensors: dict[str, torch.Tensor] = {}
    for i, (dtype, shape) in enumerate(kinds):
        size = int(np.prod(shape)) * dtype.itemsize
        data = bytearray(noise.randrange(2) if dtype == torch.bool else noise.randrange(256) for _ in range(size))
        flat = torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        tensors[f"t{i}"] = flat.reshape(shape)
    with ArtifactWriter(file_store, "x", "sample") as w:
        w.tensors("m", iter(tensors.items()), shard_bytes=shard_bytes)
    back = open_artifact(w.ref).tensors("m")
    assert back.keys() == tensors.keys()
    assert all(same(back[name], tensors[name]) for name in tensors)


def test_equal_runs_have_equal_digests_wherever_and_whenever_they_ran(tmp_path: Path) -> None:
    refs = []
    for run in ("one", "two"):
        store = Store.at(f"{tmp_path}/{run}")
        source = write(store, "source")
        refs.append(write(store, "x", inputs=[source], config_hash="c", provenance={"run": run}))
    assert refs[0].digest == refs[1].digest
    assert refs[0].uri != refs[1].uri


@pytest.mark.parametrize("change", [{"config_hash": "d"}, {"schema_version": 2}, {"inputs": "other"}])
def test_other_content_has_another_digest(tmp_path: Path, change: dict[str, Any]) -> None:
    store = Store.at(str(tmp_path))
    if "inputs" in change:
        change = {"inputs": [write(store, "source")]}
    assert write(store, "a").digest != write(store, "b", **change).digest


@given(st.lists(st.integers(0, 50), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_equal_tables_have_equal_bytes_however_chunked(file_store: Store, cuts: list[int]) -> None:
    bounds = sorted({0, 50, *cuts})
    chunked = pa.concat_tables([TABLE.slice(a, b - a) for a, b in pairwise(bounds)])
    digests = []
    for key, table in (("a", TABLE), ("b", chunked.replace_schema_metadata({"by": "someone"}))):
        file_store.delete(key)
        with ArtifactWriter(file_store, key, "rows") as w:
            w.table("rows", table)
        digests.append(w.ref.digest)
    assert digests[0] == digests[1]


def test_find_gives_the_ref_without_reading_data(file_store: Store) -> None:
    assert find_artifact(file_store, "run/x") is None
    ref = write(file_store)
    folder = open_artifact(ref).manifest.folder
    file_store.delete(f"run/x/{folder}")
    assert find_artifact(file_store, "run/x") == ref
    with pytest.raises(Corrupted, match=r"raw\.bin"):
        open_artifact(ref).bytes("raw.bin")


def test_a_flow_that_passes_refs_imports_nothing_heavy() -> None:
    code = "import sys, infra.storage.artifacts; print({'torch', 'pyarrow', 's3fs', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_ref_is_small_json(file_store: Store) -> None:
    ref = write(file_store)
    assert ArtifactRef.model_validate_json(ref.model_dump_json()) == ref
    assert len(ref.model_dump_json()) < 400


class CrashError(Exception):
    pass


class Faults:
    """Lets `after` operations of the file backend pass, then fails every one, as a dead process or disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.left: int | None = None
        self.lock = threading.Lock()
        for target, names in {
            "infra.storage.files.Files": ("open", "create"),
            "infra.storage.files._FileSink": ("write", "close"),
            "infra.storage.files.os": ("link", "fsync"),
        }.items():
            for name in names:
                self._wrap(monkeypatch, target, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, target: str, name: str) -> None:
        from infra.storage import files

        owner = getattr(files, target.rpartition(".")[2])
        original = getattr(owner, name)

        def operation(*arguments: Any, **named: Any) -> Any:
            with self.lock:
                if self.left is not None:
                    if self.left <= 0:
                        raise CrashError(name)
                    self.left -= 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, operation)


def test_a_crash_between_any_two_writes_leaves_no_artifact_or_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    crashes = whole = 0
    for after in range(1000):
        store = Store.at(f"{tmp_path}/{after}")
        faults.left = after
        try:
            write(store)
        except CrashError:
            crashes += 1
        else:
            break
        finally:
            faults.left = None
        # Only a fault after the manifest's link (its folder's fsync) can leave the artifact, and then it is whole.
        left = find_artifact(store, "run/x")
        whole += left is not None
        ref = write(store)  # the retry
        assert left in (None, ref)
        assert open_artifact(ref).table("rows").equals(TABLE)
        assert open_artifact(ref).tensors("model").keys() == TENSORS.keys()
        assert len({key.split("/")[2] for key in store.keys("run/x")}) == 2, "the crashed writer's files are swept"
    assert crashes > 30
    assert whole <= 2


def test_an_exception_in_the_block_leaves_nothing(file_store: Store) -> None:
    def die(w: ArtifactWriter) -> None:
        fill(w)
        raise CrashError

    with pytest.raises(CrashError), ArtifactWriter(file_store, "run/x", "sample") as w:
        die(w)
    assert find_artifact(file_store, "run/x") is None
    assert file_store.keys() == []


def test_files_of_a_manifest_put_whose_reply_was_lost_are_kept(
    file_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Files.create

    def arrives_but_raises(self: Files, path: str, data: bytes) -> bool:
        create(self, path, data)
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(Files, "create", arrives_but_raises)
        with pytest.raises(CrashError):
            write(file_store)
    ref = find_artifact(file_store, "run/x")
    assert ref is not None
    assert open_artifact(ref).bytes("raw.bin") == b"raw"


def test_racing_writers_agree_on_one_artifact(file_store: Store) -> None:
    start = threading.Barrier(6)

    def race(i: int) -> tuple[ArtifactRef, bool]:
        start.wait()
        with ArtifactWriter(file_store, "run/x", "sample", metadata={"writer": i}) as w:
            fill(w)
        return w.ref, w.adopted

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(race, range(6)))
    assert len({ref.digest for ref, _ in results}) == 1
    assert sum(not adopted for _, adopted in results) == 1
    read_all(results[0][0])
    assert len({key.split("/")[2] for key in file_store.keys("run/x")}) == 2, "only the winner's files remain"


def test_a_resumable_writer_writes_only_what_another_has_not_left(
    file_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_both(w: ArtifactWriter) -> None:
        w.bytes("one", b"1")
        w.tensors("model", TENSORS)

    with pytest.raises(CrashError), ArtifactWriter(file_store, "run/x", "sample", resumable=True) as w:
        fill_both(w)
        w.bytes("other", b"not written again")
        raise CrashError
    assert find_artifact(file_store, "run/x") is None
    opened: list[str] = []
    original = Files.open
    monkeypatch.setattr(Files, "open", lambda self, path: opened.append(path) or original(self, path))
    with ArtifactWriter(file_store, "run/x", "sample", resumable=True) as w:
        fill_both(w)
        w.bytes("two", b"2")
    assert [path.rpartition("-")[2] for path in opened] == ["two"]
    artifact = open_artifact(w.ref)
    assert (artifact.bytes("one"), artifact.bytes("two")) == (b"1", b"2")
    assert artifact.tensors("model").keys() == TENSORS.keys()
    assert {key.removeprefix("run/x/") for key in file_store.keys("run/x")} == {
        "manifest.json",
        *artifact.manifest.places,
    }


@pytest.mark.parametrize("dying", [False, True])
def test_resumable_writers_at_once_never_lose_each_others_files(file_store: Store, dying: bool) -> None:
    """Some of them equal, some not, some dying: what is committed is whole, and in the end all there is."""
    start = threading.Barrier(8)

    def race(i: int) -> ArtifactRef | None:
        start.wait()
        try:
            with ArtifactWriter(file_store, "run/x", "sample", resumable=True) as w:
                w.bytes("same", b"same" * 10_000)
                w.bytes("mine", str(i % 3).encode() * 10_000)
                if dying and i % 2:
                    raise CrashError
            return w.ref
        except CrashError:
            return None

    with ThreadPoolExecutor(8) as pool:
        refs = {ref for ref in pool.map(race, range(8)) if ref}
    assert len({ref.digest for ref in refs}) == 1
    read_all(refs.pop())


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_anywhere_is_found_and_its_file_named(file_store: Store, data: st.DataObject) -> None:
    file_store.delete("run")
    ref = write(file_store)
    key = data.draw(st.sampled_from([key for key in file_store.keys("") if file_store.size(key)]))
    path = Path(file_store.path(key))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(Corrupted) as error:
        read_all(ref)
    assert path.name in str(error.value)
    assert ref.uri in str(error.value)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_a_truncated_or_longer_file_is_found(file_store: Store, change: Any) -> None:
    artifact = open_artifact(write(file_store))
    path = Path(artifact.store.path(f"{artifact.manifest.folder}/rows.parquet"))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(Corrupted, match=r"rows\.parquet"):
        artifact.table("rows")


def test_a_ref_to_other_content_is_refused(file_store: Store) -> None:
    ref = write(file_store)
    with pytest.raises(Corrupted, match="another artifact"):
        open_artifact(ref.model_copy(update={"digest": "blake3:00"}))
    with pytest.raises(BadInput, match="no artifact"):
        open_artifact(ref.model_copy(update={"uri": f"{ref.uri}/nothing"}))


def test_misuse_of_a_writer_is_named(file_store: Store) -> None:
    with pytest.raises(BadInput, match="twice"), ArtifactWriter(file_store, "x", "sample") as w:
        w.json("rows", [w.bytes("rows.json", b"")])
    with pytest.raises(BadInput, match="JSON"), ArtifactWriter(file_store, "x", "sample") as w:
        w.json("a", float("nan"))
    with pytest.raises(BadInput, match="t0"), ArtifactWriter(file_store, "x", "sample") as w:
        w.tensors("m", [("t0", torch.zeros(1)), ("t0", torch.zeros(1))])
    with pytest.raises(BadInput, match=r"\.\."), ArtifactWriter(file_store, "x", "sample") as w:
        w.bytes("../a", b"")
    with pytest.raises(BadInput, match=r"rows\.parquet"):
        open_artifact(write(file_store)).table("nothing")
    assert find_artifact(file_store, "x") is None


def test_the_manifest_can_be_read_by_eye(file_store: Store) -> None:
    write(file_store)
    manifest = json.loads(file_store.read("run/x/manifest.json"))
    assert manifest["format"] == "policyflow-artifact-1"
    assert {"name", "bytes", "digest"} == manifest["files"][0].keys()
    assert {"created", "code_version", "host"} <= manifest["provenance"].keys()
