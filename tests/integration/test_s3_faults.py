"""One fault at one request of a real S3 server, where it hurts most."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from infra.errors import BadInput, Transient
from infra.runs.run import Run
from infra.storage import s3, tombstones
from infra.storage.artifacts import ArtifactWriter, find_artifact, open_artifact
from infra.storage.store import Store
from tasks.sync.retention import pin, pinned
from tests.support.faulty_s3 import FaultyS3

DATA = random.Random(0).randbytes(12 * 2**20 + 3)


pytestmark = pytest.mark.usefixtures("small_and_quick")


def once(fault: str, method: str, part: str, number: int = 0) -> Callable[[str, str], str | None]:
    """The fault of request `number` of a method whose path has `part`."""
    seen = iter(range(1000))
    return lambda by, path: fault if by == method and part in path and next(seen) == number else None


@pytest.mark.parametrize("fault", ["short range", "wrong range", "cut short", "reset"])
def test_a_range_that_is_not_what_was_asked_for_is_read_again(faulty: FaultyS3, fault: str) -> None:
    store = Store.at("s3://test/range")
    store.put("x", DATA)
    faulty.aim = once(fault, "GET", "/range/x", number=2)
    assert store.read("x") == DATA
    assert faulty.done[fault] == 1


def test_an_object_that_is_replaced_between_two_ranges_is_read_anew(
    faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shared file is by a publisher that comes late: the same bytes, another ETag where the bucket encrypts."""
    store, retry, replies = Store.at("s3://test/replaced"), s3._retry, list[str]()
    store.put("x", bytes(len(DATA)))

    def replacing[T](path: str, call: Callable[[], T]) -> T:
        found = retry(path, call)
        replies.append(path)
        if len(replies) == 1:
            store.put("x", DATA)
        return found

    monkeypatch.setattr(s3, "_retry", replacing)
    assert store.read("x") == DATA


def test_a_commit_whose_reply_was_lost_keeps_its_files_when_it_is_touched_meanwhile(
    faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sleep = Store.at("s3://test/touched"), time.sleep

    def touching(seconds: float) -> None:
        sleep(seconds)
        ref = find_artifact(store, "x")
        assert ref is not None and tombstones.touch(ref)

    monkeypatch.setattr(time, "sleep", touching)
    faulty.aim = once("lost reply", "PUT", "/touched/x/manifest.json")
    with ArtifactWriter(store, "x", "sample") as writer:
        writer.bytes("blob", b"1")
    assert open_artifact(writer.ref).bytes("blob") == b"1"


@pytest.mark.parametrize("fault", ["expired", "refused"])
def test_credentials_that_expire_are_named_at_every_kind_of_request(faulty: FaultyS3, fault: str) -> None:
    store = Store.at("s3://test/expire")
    faulty.aim = lambda method, path: fault
    for call in (
        store.read,
        store.size,
        lambda key: find_artifact(store, key),
        store.keys,
        store.delete,
        lambda key: store.put(key, b""),
    ):
        with pytest.raises(BadInput, match="s3://test/expire/x.*AWS_ACCESS_KEY_ID"):
            call("x")


def test_a_pin_is_seen_though_lists_lag(faulty: FaultyS3) -> None:
    run = Run(store="s3://test/pins", name="r")
    pin(run, "a", "s3://test/pins/a")
    assert pinned(run) == {"s3://test/pins/a"}
    pin(run, "b", "s3://test/pins/b")
    faulty.aim = lambda method, path: "stale list" if "list-type" in path else None
    assert pinned(run) == {"s3://test/pins/a", "s3://test/pins/b"}


def test_a_commit_drops_what_writers_that_were_killed_have_sent(store: Store) -> None:
    keys = ["x/files-1/blob", "x/shared/blob", "x/shared/other", "y/shared/blob"]
    killed = [store.open(key) for key in keys]
    for sink in killed:
        sink.write(DATA)
    assert (store.uploads(), store.keys()) == (keys, []), "on S3 their parts are billed"
    with ArtifactWriter(store, "x", "sample", resumable=True) as writer:
        writer.bytes("blob", DATA)
    assert store.uploads() == ["y/shared/blob"], "of another artifact"
    for sink in killed[:3]:  # one that was suspended, and is not dead, is told
        with pytest.raises(FileNotFoundError):
            sink.close()
    store.delete("y")
    assert store.uploads() == []
    assert open_artifact(writer.ref).bytes("blob") == DATA


def test_who_may_not_list_uploads_commits_and_collects(faulty: FaultyS3, caplog: pytest.LogCaptureFixture) -> None:
    store = Store.at("s3://test/no-right")
    faulty.aim = lambda method, path: "refused" if "?uploads" in path and method == "GET" else None
    with ArtifactWriter(store, "x", "sample", resumable=True) as writer:
        writer.bytes("blob", b"1")
    assert open_artifact(writer.ref).bytes("blob") == b"1"
    assert store.uploads() == [] and "billed" in caplog.text


def test_a_writer_whose_key_was_deleted_is_told_so(store: Store) -> None:
    with pytest.raises(Transient, match="x was deleted"), ArtifactWriter(store, "x", "sample", resumable=True):
        assert tombstones.bury(store / "x", None)
        raise FileNotFoundError("a part of an upload that was dropped")


def test_what_goes_while_it_is_in_the_way_is_not_in_the_way(faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    store, call, asked = Store.at("s3://test/created"), s3.S3.call, list[str]()
    store.put("x", b"another's")

    def deleting(self: s3.S3, method: str, path: str, **arguments: Any) -> Any:
        if method == "head_object" and not asked:
            asked.append(path)
            call(self, "delete_object", path)
        return call(self, method, path, **arguments)

    monkeypatch.setattr(s3.S3, "call", deleting)
    assert store.create("x", b"mine") and asked
    assert store.read("x") == b"mine"
