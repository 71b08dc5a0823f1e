"""The store on a real S3 server: the guarantees of file:// hold there too, and access is really checked."""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from infra.errors import BadInput, Corrupted, Transient
from infra.policy import reader, writer
from infra.policy.version import describe, digest_tensors
from infra.storage import s3
from infra.storage.artifacts import ArtifactRef, ArtifactWriter, Store, find_artifact, open_artifact
from infra.storage.s3_server import S3Server

TABLE = pa.table({"a": list(range(1000))})


def write(store: Store, key: str = "run/x", **metadata: Any) -> tuple[ArtifactRef, bool]:
    with ArtifactWriter(store, key, "sample", metadata=metadata) as w:
        w.table("rows", TABLE)
        w.tensors("model", {"w": torch.arange(12).reshape(3, 4).bfloat16()})
    return w.ref, w.adopted


def folders(store: Store, key: str) -> set[str]:
    return {name.split("/")[2] for name in store.keys(key)}


def test_an_artifact_is_read_back_on_every_kind_of_store(store: Store) -> None:
    assert find_artifact(store, "run/x") is None
    ref, _ = write(store)
    assert find_artifact(store, "run/x") == ref
    artifact = open_artifact(ref)
    assert artifact.table("rows").equals(TABLE)
    tensor = artifact.tensors("model")["w"]
    assert torch.equal(tensor, torch.arange(12).reshape(3, 4).bfloat16())
    tensor += 1  # what was read is the reader's own
    assert artifact.tensors("model")["w"].sum() == 66


def test_the_same_content_has_the_same_digest_on_every_kind_of_store(s3_store: Store, tmp_path: Path) -> None:
    assert write(s3_store / "digest")[0].digest == write(Store.at(str(tmp_path)))[0].digest


def test_create_and_replace_are_conditional_on_every_kind_of_store(store: Store) -> None:
    assert store.create("a/head", b"1")
    assert not store.create("a/head", b"2")
    assert not store.replace("a/head", b"3", b"2")
    assert store.replace("a/head", b"3", b"1")
    assert not store.replace("a/nothing", b"3", b"1")
    assert store.replace("a/new", b"", None)
    assert (store.read("a/head"), store.read("a/new"), store.size("a/new")) == (b"3", b"", 0)
    assert store.keys("a") == ["a/head", "a/new"]
    store.put("a/head", b"4")
    store.put("a/head", b"5")
    assert store.read("a/head") == b"5"
    store.delete("a")
    assert store.keys() == []


@pytest.mark.parametrize("key", ["a b/c+d", "ünï/çødé", "100%/x#y?z=1", "a:b@c&d", "*[x]"])
def test_odd_keys_mean_the_same_on_every_kind_of_store(store: Store, key: str) -> None:
    assert store.create(key, b"x")
    assert (store.read(key), store.keys()) == (b"x", [key])


def test_one_of_many_racing_creators_wins_on_every_kind_of_store(store: Store) -> None:
    start = threading.Barrier(8)

    def race(i: int) -> bool:
        start.wait()
        return store.create("race", str(i).encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert won.count(True) == 1
    assert store.read("race") == str(won.index(True)).encode()


def test_no_increment_is_lost_between_racing_replacers(s3_store: Store) -> None:
    store = s3_store / "increments"
    store.create("counter", b"0")

    def increment(_: int) -> None:
        while True:
            now = store.read("counter")
            if store.replace("counter", str(int(now) + 1).encode(), now):
                return

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(increment, range(9)))
    assert store.read("counter") == b"9"


def test_racing_writers_agree_on_one_artifact(s3_store: Store) -> None:
    store = s3_store / "racing"
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: write(store, writer=i), range(4)))
    assert len({ref.digest for ref, _ in results}) == 1
    assert sum(not adopted for _, adopted in results) == 1
    assert open_artifact(results[0][0]).table("rows").equals(TABLE)
    assert len(folders(store, "run/x")) == 2, "only the winner's files and the manifest remain"


def test_a_big_object_goes_in_parts_and_comes_back_in_ranges(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)
    data = random.Random(0).randbytes(17 * 2**20 + 3)
    with ArtifactWriter(s3_store, "big", "sample") as w:
        w.bytes("blob", data)
    assert open_artifact(w.ref).bytes("blob") == data


def test_a_writer_that_dies_in_a_big_object_leaves_nothing(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)
    store = s3_store / "dies"

    def tensors() -> Any:
        yield "a", torch.zeros(3 * 2**20)
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"), ArtifactWriter(store, "x", "sample") as w:
        w.tensors("m", tensors(), shard_bytes=2**20)
    assert find_artifact(store, "x") is None
    assert store.keys() == []


def test_a_crash_at_any_request_leaves_no_artifact_or_a_whole_one(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = s3.S3.call
    for after in range(20):
        store = s3_store / f"crash-{after}"
        left = [after]

        def call(self: s3.S3, method: str, path: str, _left: list[int] = left, **arguments: Any) -> dict[str, Any]:
            if _left[0] <= 0:
                raise Transient(f"injected at {method} {path}")
            _left[0] -= 1
            return original(self, method, path, **arguments)

        with monkeypatch.context() as patch:
            patch.setattr(s3.S3, "call", call)
            try:
                write(store)
            except Transient:
                assert find_artifact(store, "run/x") is None
            else:
                break
        ref, adopted = write(store)  # the retry
        assert not adopted
        assert open_artifact(ref).table("rows").equals(TABLE)
        assert len(folders(store, "run/x")) == 2, "the crashed writer's files are swept"
    assert after == 3, "two data files and the manifest: three requests"


def test_a_put_whose_reply_was_lost_still_wins(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    client = s3.connect()
    original = client.fs.call_s3
    lost = []

    def call_s3(method: str, **arguments: Any) -> Any:
        reply = original(method, **arguments)
        if method == "put_object" and not lost:
            lost.append(method)
            raise ConnectionResetError("the reply was lost")
        return reply

    monkeypatch.setattr(client.fs, "call_s3", call_s3)
    assert s3_store.create("lost-reply", b"mine")
    assert not s3_store.create("lost-reply", b"mine")
    assert lost


def test_a_changed_object_is_found_and_its_file_named(s3_store: Store) -> None:
    ref, _ = write(s3_store / "damaged")
    artifact = open_artifact(ref)
    key = f"{artifact.manifest.folder}/rows.parquet"
    content = bytearray(artifact.store.read(key))
    content[len(content) // 2] ^= 1
    sink = artifact.store.open(key)
    sink.write(content)
    sink.close()
    with pytest.raises(Corrupted, match=r"rows\.parquet"):
        artifact.table("rows")


def test_a_policy_version_is_read_back(s3_store: Store) -> None:
    weights = {"router": torch.randn(4, 8), "mlp": torch.randn(8, 8).bfloat16()}
    ref = writer.write_full(s3_store, "policy/v1", weights.items(), version=1, step=1)
    assert digest_tensors(reader.read(ref)) == describe(ref).policy_digest


def test_a_wrong_secret_is_refused_and_says_what_to_set(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_store.create("secret", b"")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for call in (s3_store.read, s3_store.size, lambda key: find_artifact(s3_store, key), s3_store.keys):
        with pytest.raises(BadInput, match="AWS_SECRET_ACCESS_KEY"):
            call("secret")
    with pytest.raises(BadInput, match="AWS_SECRET_ACCESS_KEY"):
        s3_store.create("other", b"")


def test_no_credentials_at_all_says_what_to_set(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with pytest.raises(BadInput, match="AWS_ACCESS_KEY_ID"):
        s3_store.read("x")


def test_a_missing_bucket_is_bad_input(s3_store: Store) -> None:
    for store in (Store.at("s3://not-there"), Store.at("s3://not-there/x")):
        with pytest.raises(BadInput, match="not-there"):
            store.create("x", b"")


def test_an_unreachable_server_is_transient(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Transient, match=r"127\.0\.0\.1:9"):
        s3_store.read("x")


def test_credentials_are_never_part_of_a_ref(s3_server: S3Server, s3_store: Store) -> None:
    ref, _ = write(s3_store / "ref")
    secret = s3_server.environment["AWS_SECRET_ACCESS_KEY"]
    assert secret not in ref.model_dump_json()
    assert secret.encode() not in open_artifact(ref).store.read("manifest.json")


def test_a_server_started_again_in_its_folder_serves_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = S3Server(tmp_path).port
    command = [
        sys.executable,
        "-m",
        "infra.storage.s3_server",
        "--dir",
        str(tmp_path),
        "--port",
        str(port),
        "--bucket",
        "kept",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("#"):
                break
            name, _, value = line.removeprefix("export ").strip().partition("=")
            monkeypatch.setenv(name, value)
        ref, _ = write(Store.at("s3://kept"))
        process.terminate()
        assert process.wait(30) == 0
    with S3Server(tmp_path, port).start():
        assert open_artifact(ref).table("rows").equals(TABLE)
        with pytest.raises(BadInput, match=str(port)):
            S3Server(tmp_path, port).start()


def test_another_process_reads_what_this_one_wrote(s3_store: Store) -> None:
    ref, _ = write(s3_store / "process")
    code = "import sys; from infra.storage.artifacts import *; r = ArtifactRef.model_validate_json(sys.argv[1]); "
    code += "print(open_artifact(r).table('rows').num_rows)"
    done = subprocess.run([sys.executable, "-c", code, ref.model_dump_json()], capture_output=True, text=True)
    assert done.stdout.strip() == "1000", done.stderr
