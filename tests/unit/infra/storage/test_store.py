"""What every stage relies on: a key cannot leave the store, and of racing writers one wins."""

import os
import pickle
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import BadInput, Transient
from infra.storage.artifacts import find_artifact
from infra.storage.store import Store, check_key

ODD_KEYS = [
    "..",
    "a/../b",
    "/etc/passwd",
    "a//b",
    "a/",
    "",
    ".",
    "a/.hidden",
    "a\x00b",
    "a\\b",
    "a\nb",
    "\ud800",
    "x" * 201,
]
NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40).filter(
    lambda name: "/" not in name and "\\" not in name and not name.startswith(".") and len(name.encode()) <= 200
)
KEYS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize("key", ODD_KEYS)
def test_a_key_that_could_leave_the_store_is_refused_by_name(file_store: Store, key: str) -> None:
    for call in (
        file_store.read,
        file_store.size,
        file_store.delete,
        file_store.open,
        lambda key: find_artifact(file_store, key),
    ):
        with pytest.raises(BadInput, match="key") as error:
            call(key)
        assert repr(key) in str(error.value)
    with pytest.raises(BadInput):
        file_store.create(key, b"")


@given(st.text())
def test_any_key_is_either_refused_or_stays_below_the_root(key: str) -> None:
    store = Store.at("file:///srv/folder")
    try:
        path = store.path(key)
    except BadInput:
        return
    assert os.path.normpath(path) == path
    assert path.startswith("/srv/folder/")


@given(KEYS)
def test_ordinary_keys_are_accepted(key: str) -> None:
    assert check_key(key) == key


def test_what_was_created_under_any_key_is_read_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    @given(KEYS, st.binary(max_size=200))
    def round_trip(key: str, data: bytes) -> None:
        store = Store.at(str(tmp_path_factory.mktemp("store")))
        assert store.create(key, data)
        assert (store.read(key), store.size(key), store.keys()) == (data, len(data), [key])

    round_trip()


def test_a_relative_folder_becomes_an_absolute_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Store.at("outputs/x").url == f"file://{tmp_path}/outputs/x"
    assert Store.at("file:///a/./b/").url == "file:///a/b"
    assert Store.at("s3://bucket/prefix/").url == "s3://bucket/prefix"
    assert Store.at("s3://bucket").url == "s3://bucket"


@pytest.mark.parametrize(
    "url", ["", "s3://", "s3:///x", "s3://bucket/../x", "gs://bucket", "file://host/x", "s3://a_b/x"]
)
def test_a_url_that_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(BadInput):
        Store.at(url)


def test_a_store_travels_between_processes(file_store: Store) -> None:
    assert pickle.loads(pickle.dumps(file_store)) == file_store
    assert len(pickle.dumps(file_store)) < 500


def test_create_never_overwrites(file_store: Store) -> None:
    assert file_store.create("a/b", b"first")
    assert not file_store.create("a/b", b"second")
    assert file_store.read("a/b") == b"first"


def test_replace_needs_the_expected_content(file_store: Store) -> None:
    assert file_store.replace("head", b"1", None)
    assert not file_store.replace("head", b"2", None)
    assert not file_store.replace("head", b"2", b"0")
    assert file_store.replace("head", b"2", b"1")
    assert not file_store.replace("missing", b"2", b"1")
    assert file_store.read("head") == b"2"
    assert file_store.keys() == ["head"]


def test_put_replaces_whatever_is_there(file_store: Store) -> None:
    file_store.put("report", b"long first")
    file_store.put("report", b"second")
    assert (file_store.read("report"), file_store.keys()) == (b"second", ["report"])


def test_one_of_many_racing_creators_wins(file_store: Store) -> None:
    start = threading.Barrier(8)

    def race(i: int) -> bool:
        start.wait()
        return file_store.create("race", str(i).encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert won.count(True) == 1
    assert file_store.read("race") == str(won.index(True)).encode()


def test_no_increment_is_lost_between_racing_replacers(file_store: Store) -> None:
    file_store.create("counter", b"0")

    def increment(_: int) -> None:
        while True:
            now = file_store.read("counter")
            if file_store.replace("counter", str(int(now) + 1).encode(), now):
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(40)))
    assert file_store.read("counter") == b"40"


def test_writing_to_what_was_read_does_not_change_the_file(file_store: Store) -> None:
    file_store.create("x", b"abc")
    view = memoryview(file_store.buffer("x"))
    view[0] = ord("z")
    assert file_store.read("x") == b"abc"


def test_deleting_is_recursive_and_can_be_repeated(file_store: Store) -> None:
    file_store.create("a/b/c", b"")
    file_store.create("a/d", b"")
    file_store.delete("a")
    file_store.delete("a")
    assert file_store.keys() == []


def test_a_missing_object_is_not_found(file_store: Store) -> None:
    assert file_store.size("nothing") is None
    assert find_artifact(file_store, "nothing") is None
    with pytest.raises(FileNotFoundError):
        file_store.read("nothing")


def test_a_file_where_a_folder_is_needed_is_bad_input(file_store: Store) -> None:
    file_store.create("a", b"")
    with pytest.raises(BadInput, match="a/b"):
        file_store.create("a/b", b"")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_bad_input(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(BadInput, match="permission"):
        Store.at(str(tmp_path)).create("a", b"")


class Flaky:
    """Fails with each of `faults` in turn, then succeeds."""

    def __init__(self, *faults: Exception):
        self.faults = list(faults)

    def __call__(self) -> str:
        if self.faults:
            raise self.faults.pop(0)
        return "done"


def _status(code: str, status: int) -> Exception:
    from botocore.exceptions import ClientError

    reply = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(5, code)
    error.__cause__ = ClientError(reply, "PutObject")  # pyright: ignore[reportArgumentType]
    return error


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.storage.s3.FIRST_DELAY_S", 0.0)


PASSING = [ConnectionResetError(), TimeoutError(), _status("SlowDown", 503), _status("InternalError", 500)]


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: str(fault) or type(fault).__name__)
def test_a_passing_fault_is_retried_and_a_lasting_one_is_transient(no_wait: None, fault: Exception) -> None:
    from infra.storage.s3 import ATTEMPTS, _retry

    assert _retry("bucket/x", Flaky(fault, fault)) == "done"
    with pytest.raises(Transient, match="bucket/x"):
        _retry("bucket/x", Flaky(*[fault] * ATTEMPTS))


def test_refused_access_and_missing_objects_are_not_retried(no_wait: None) -> None:
    from infra.storage.s3 import _retry

    for fault, raised in [
        (PermissionError("denied"), BadInput),
        (_status("InvalidAccessKeyId", 403), BadInput),
        (_status("NoSuchBucket", 404), BadInput),
        (FileNotFoundError(), FileNotFoundError),
    ]:
        with pytest.raises(raised, match="bucket/x"):
            _retry("bucket/x", Flaky(fault))


@pytest.mark.parametrize("folder", ["/proc/x", "/proc/x/y", "/dev/null/x", "/tmp/" + "x" * 300])
def test_a_folder_that_no_store_can_be_in_is_refused(folder: str) -> None:
    with pytest.raises(
        BadInput, match=f"file://{folder[:7]}.*; choose another store|a file where the key needs a folder"
    ):
        Store.at(folder).create("runs/r/run.json", b"{}")
    with pytest.raises(
        BadInput, match=f"file://{folder[:7]}.*; choose another store|a file where the key needs a folder"
    ):
        Store.at(folder).open("runs/r/data").close()


def test_a_folder_is_deleted_while_others_write_there(file_store: Store) -> None:
    ended = threading.Event()

    def write(number: int) -> None:
        while not ended.is_set():
            with suppress(FileNotFoundError):  # its folder went
                file_store.put(f"a/b{number}/x", b"")

    writers = []
    with ThreadPoolExecutor(4) as pool:
        for number in range(3):
            writers.append(pool.submit(write, number))
        try:
            for _ in range(300):
                file_store.delete("a")
        finally:
            ended.set()
    assert [writer.result() for writer in writers] == [None] * 3
    file_store.delete("a")
    assert file_store.keys() == []


def test_folders_are_listed_without_what_is_in_them(store: Store):
    assert store.folders("runs") == []
    for key in ("runs/b/run.json", "runs/a/steps/00000/x.json", "runs/a/run.json", "runs/file", "runsx/c/run.json"):
        store.put(key, b"x")
    assert store.folders("runs") == ["a", "b"]
