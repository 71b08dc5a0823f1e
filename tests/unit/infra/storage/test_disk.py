"""A disk that is full: every write of the store says so by one name, shows nothing, and works when there is room again."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from infra.errors import BadInput, NoRoom, Transient
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactWriter, find_artifact, open_artifact
from infra.storage.disk import explained, full_places, require_writable
from infra.storage.store import Store
from tests.support.disks import filled, resize, small_disk

BIG = bytes(300_000)


def _sink(store: Store) -> None:
    sink = store.open("sink/new")
    sink.write(BIG)
    sink.close()


def _artifact(write: Callable[[ArtifactWriter], Any], resumable: bool = False) -> Callable[[Store], None]:
    def make(store: Store) -> None:
        with ArtifactWriter(store, "made", "test", resumable=resumable) as writer:
            write(writer)

    return make


TABLE = pa.table({"x": pa.array(torch.randn(40_000, generator=torch.Generator().manual_seed(0)).numpy())})
TENSORS = {"a": torch.ones(50_000), "b": torch.zeros(50_000)}
WRITES: dict[str, Callable[[Store], Any]] = {
    "open": _sink,
    "put": lambda store: store.put("put", BIG),
    "create": lambda store: store.create("create", BIG),
    "replace": lambda store: store.replace("pointer", BIG, expected=b"old"),
    "bytes": _artifact(lambda writer: writer.bytes("x", BIG)),
    "json": _artifact(lambda writer: writer.json("x", ["y" * 300_000])),
    "table": _artifact(lambda writer: writer.table("x", TABLE)),
    "tensors": _artifact(lambda writer: writer.tensors("x", TENSORS, shard_bytes=200_000)),
    "resumable tensors": _artifact(lambda writer: writer.tensors("x", TENSORS, shard_bytes=200_000), resumable=True),
    "manifest alone": _artifact(lambda writer: writer.metadata.update(x="y" * 300_000)),
    "run": lambda store: Run(store=store.url, name="r").write_json("report.json", ["y" * 300_000]),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", mib=2) as folder:
        yield folder


@pytest.fixture
def full_store(disk: Path) -> Store:
    store = Store.at(str(disk / "store"))
    store.put("pointer", b"old")
    return store


def visible(store: Store) -> dict[str, bytes]:
    return {key: store.read(key) for key in store.keys() if not key.startswith("made/files")}


@pytest.mark.parametrize("name", WRITES)
def test_every_write_names_the_full_disk_shows_nothing_and_works_again_with_room(
    disk: Path, full_store: Store, name: str
):
    write, before = WRITES[name], visible(full_store)
    with filled(disk), pytest.raises(NoRoom, match="the disk is full") as caught:
        write(full_store)
    assert str(disk / "store") in str(caught.value) and "0.0 MiB left" in str(caught.value)
    assert visible(full_store) == before
    assert not [path for path in disk.rglob("*") if path.name.endswith(".tmp")], "what did not fit takes no room"
    write(full_store)
    assert visible(full_store) != before


def test_a_limit_on_a_file_s_size_is_told_like_a_full_disk(tmp_path: Path):
    store = Store.at(str(tmp_path / "store"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(NoRoom, match="the limit of a file's size"):
            store.put("x", BIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert store.keys() == []
    store.put("x", BIG)


def test_a_writer_that_found_no_room_is_followed_by_one_that_goes_on(disk: Path, full_store: Store):
    """Of a resumable artifact what did fit is not written again."""
    parts = {name: torch.full((200_000,), float(index)) for index, name in enumerate("abc")}  # 0.8 MB each, of 2.1 MB
    with pytest.raises(NoRoom), ArtifactWriter(full_store, "made", "test", resumable=True) as writer:
        writer.tensors("x", parts, shard_bytes=1)
    kept = {path: path.stat().st_ino for path in disk.rglob("*.safetensors")}
    assert 1 <= len(kept) < 3 and find_artifact(full_store, "made") is None
    resize(disk, mib=8)
    with ArtifactWriter(full_store, "made", "test", resumable=True) as writer:
        writer.tensors("x", parts, shard_bytes=1)
    assert kept.items() <= {path: path.stat().st_ino for path in disk.rglob("*.safetensors")}.items()
    assert torch.equal(open_artifact(writer.ref).tensors("x")["c"], parts["c"])


def test_full_places_are_named_with_what_they_hold(disk: Path, tmp_path: Path):
    places = {"the store": disk / "not" / "yet", "HOME": tmp_path}
    full = f"{disk}/not/yet (the store): the disk is full (0.0 MiB left in {disk})"
    assert full_places(places) == []
    lost = RuntimeError("database or disk is full")  # as SQLite says it, without a place
    assert explained(lost, places) is None
    with filled(disk):
        assert explained(lost, places) == f"{full}; make room, and start the same run again"
        assert full_places(places) == [full]


def test_an_error_that_came_from_a_full_disk_names_the_file(disk: Path):
    with pytest.raises(ValueError, match="cannot save") as caught, filled(disk):
        try:
            with open(disk / "x", "wb", buffering=0) as file:
                file.write(BIG)
        except OSError as error:
            error.filename = str(disk / "x")  # as open itself tells it
            raise ValueError("cannot save") from error
    assert explained(caught.value, {}).startswith(f"{disk}/x: the disk is full (")
    assert explained(ValueError("cannot save"), {}) is None


def test_a_folder_of_the_environment_that_cannot_be_written_is_named(disk: Path):
    with pytest.raises(BadInput, match=r"PREFECT_HOME /proc/nope: nothing can be written there .*; set PREFECT_HOME"):
        require_writable("PREFECT_HOME", "/proc/nope")
    require_writable("PREFECT_HOME", disk / "new" / "folder")
    with filled(disk), pytest.raises(NoRoom, match=rf"PREFECT_HOME {disk}/new: the disk is full"):
        require_writable("PREFECT_HOME", disk / "new")


def test_no_room_may_pass():
    assert issubclass(NoRoom, Transient)
