"""What is collected, and what must not be: all that a kept version is made of."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

from infra.errors import BadInput, Corrupted, Transient
from infra.policy import reader
from infra.policy.follow import follow
from infra.policy.version import digest_tensors
from infra.storage.artifacts import ArtifactRef, find_artifact
from infra.storage.store import Store
from tasks.sync import retention
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tasks.sync.retention import drop_old_versions, holding, pin, unpin
from tests.support.tensor_engine import TensorEngine, TensorTrainer
from tests.unit.infra.policy.test_follow import CONFIG, Chain, tensors


def left(chain: Chain) -> list[int]:
    def exists(ref: ArtifactRef) -> bool:
        parent, _, leaf = ref.uri.rpartition("/")
        return find_artifact(Store.at(parent), leaf) is not None

    return [number for number, ref in enumerate(chain.refs) if exists(ref)]


def test_the_last_versions_and_what_they_are_made_of_stay(tmp_path: Path) -> None:
    chain = Chain(tmp_path, SyncConfig(anchor_every=4))
    chain.publish(11)
    drop_old_versions(chain.run, chain.refs[10], keep=2)
    assert left(chain) == [0, 8, 9, 10], "9 and 10 are made of anchor 8; version 0 always stays"
    assert drop_old_versions(chain.run, chain.refs[10], keep=2) == []
    for number in (0, 8, 9, 10):
        assert digest_tensors(reader.read(chain.refs[number])) == chain.digests[number]


def test_what_a_pin_names_stays_until_it_is_dropped(tmp_path: Path) -> None:
    chain = Chain(tmp_path, SyncConfig(anchor_every=3))
    chain.publish(10)
    pin(chain.run, "engine-b", chain.refs[5].uri)
    drop_old_versions(chain.run, chain.refs[9], keep=1)
    assert left(chain) == [0, 3, 4, 5, 9]
    engine = TensorEngine(tensors())
    follow(engine, chain.refs[5])
    assert engine.version == chain.digests[5]
    unpin(chain.run, "engine-b")
    drop_old_versions(chain.run, chain.refs[9], keep=1)
    assert left(chain) == [0, 9]


@pytest.mark.parametrize("of_before", [False, True])
def test_pins_and_versions_move_with_their_store(tmp_path: Path, of_before: bool) -> None:
    chain = Chain(tmp_path / "here", SyncConfig(anchor_every=3))
    chain.publish(10)
    pin(chain.run, "engine-b", chain.refs[5].uri)
    pins = tmp_path / "here/store/runs/r/pins.json"
    assert str(tmp_path) not in pins.read_text()
    if of_before:
        pins.write_text(json.dumps({"engine-b": {"uri": chain.refs[5].uri, "until": None}}))
    (tmp_path / "here").rename(tmp_path / "there")
    chain.run = chain.run.model_copy(update={"store": f"file://{tmp_path}/there/store"})
    chain.refs = [ref.model_copy(update={"uri": ref.uri.replace("/here/", "/there/")}) for ref in chain.refs]
    drop_old_versions(chain.run, chain.refs[9], keep=1)
    assert left(chain) == [0, 3, 4, 5, 9]
    for number in left(chain):
        assert digest_tensors(reader.read(chain.refs[number])) == chain.digests[number]
    unpin(chain.run, "engine-b")
    drop_old_versions(chain.run, chain.refs[9], keep=1)
    assert left(chain) == [0, 9]


def test_a_lagging_engine_whose_deltas_are_gone_gets_the_newest_whole(tmp_path: Path) -> None:
    chain = Chain(tmp_path, SyncConfig(anchor_every=3))
    engine = TensorEngine(tensors())
    follow(engine, chain.publish(2))
    chain.publish(6)
    drop_old_versions(chain.run, chain.refs[7], keep=1)
    assert left(chain) == [0, 6, 7]
    follow(engine, chain.refs[7])
    assert engine.version == digest_tensors(engine.memory.items()) == chain.digests[7]
    assert engine.whole == 2


def test_a_version_is_held_while_it_is_used_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(tmp_path, SyncConfig(anchor_every=3))
    chain.publish(10)
    with pytest.raises(RuntimeError, match="evaluation"), holding(chain.run, chain.refs[4].uri):
        drop_old_versions(chain.run, chain.refs[9], keep=1)
        assert left(chain) == [0, 3, 4, 9]
        raise RuntimeError("in the evaluation")
    drop_old_versions(chain.run, chain.refs[9], keep=1)
    assert left(chain) == [0, 9], "a fault lets go of it"

    chain.publish(3)
    pin(chain.run, "killed", chain.refs[10].uri, seconds=retention.LEASE_S)
    drop_old_versions(chain.run, chain.refs[12], keep=1)
    assert left(chain) == [0, 9, 10, 12]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + retention.LEASE_S + 1)
    drop_old_versions(chain.run, chain.refs[12], keep=1)
    assert left(chain) == [0, 12] and retention.pinned(chain.run) == set(), "nobody renews what a killed process held"


def test_what_is_held_for_long_is_held_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(tmp_path)
    ref = chain.publish()
    monkeypatch.setattr(retention, "LEASE_S", 0.4)
    with holding(chain.run, ref.uri):
        time.sleep(1.0)
        assert retention.pinned(chain.run) == {ref.uri}
    assert retention.pinned(chain.run) == set()


def test_a_later_collection_removes_what_one_that_died_has_left(tmp_path: Path) -> None:
    chain = Chain(tmp_path, SyncConfig(anchor_every=3))
    chain.publish(7)
    with (
        mock.patch.object(Store, "delete", side_effect=RuntimeError("died")),
        pytest.raises(RuntimeError, match="died"),
    ):
        drop_old_versions(chain.run, chain.refs[6], keep=1)
    assert left(chain) == [0, 1, 2, 3, 4, 6], "the newest first: what can be seen can be read"
    drop_old_versions(chain.run, chain.refs[6], keep=1)
    assert steps_of(chain) == {0, 6}


@pytest.mark.parametrize("fault", [BadInput("access refused"), Corrupted("damaged"), Transient("503")])
def test_a_store_that_cannot_tell_what_is_needed_loses_nothing(tmp_path: Path, fault: Exception) -> None:
    """Any one read of a collection fails, and the next ones work: a token that is renewed, say."""
    chain = Chain(tmp_path, SyncConfig(anchor_every=5, keep_versions=2))
    chain.publish(9)
    pin(chain.run, "engine-b", chain.refs[4].uri)
    read, reads = Store.read, 0
    for failing in range(100):
        reads = 0

        def failing_once(self: Store, key: str, failing: int = failing) -> bytes:
            nonlocal reads
            reads += 1
            if reads == failing + 1:
                raise fault
            return read(self, key)

        with mock.patch.object(Store, "read", failing_once), suppress(type(fault)):
            drop_old_versions(chain.run, chain.refs[8], keep=2)
        for number in (4, 7, 8):
            assert digest_tensors(reader.read(chain.refs[number])) == chain.digests[number], failing
        if reads <= failing:
            break
    assert reads > 10 and left(chain) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_nothing_is_collected_when_what_is_needed_does_not_lie_there(tmp_path: Path) -> None:
    chain = Chain(tmp_path, SyncConfig(anchor_every=5))
    chain.publish(9)
    Store.at(chain.refs[6].uri).delete("manifest.json")
    with pytest.raises(Corrupted, match=chain.refs[6].uri):
        drop_old_versions(chain.run, chain.refs[8], keep=1)
    assert left(chain) == [0, 1, 2, 3, 4, 5, 7, 8]


def test_pins_that_are_written_at_once_are_all_kept(tmp_path: Path) -> None:
    run = Chain(tmp_path).run
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: pin(run, f"engine-{i}", f"{run.store}/v{i}"), range(16)))
        list(pool.map(lambda i: unpin(run, f"engine-{i}"), range(8)))
    assert retention.pinned(run) == {f"{run.store}/v{i}" for i in range(8, 16)}


def test_a_collection_drops_what_a_publisher_has_sent_that_was_killed_in_its_first_file(tmp_path: Path) -> None:
    chain = Chain(tmp_path, SyncConfig(anchor_every=3))
    chain.publish(7)
    steps = Store.at(chain.run.store) / "runs/r/steps"
    killed = [steps.open(f"0000{number}/policy-killed/shared/model") for number in (2, 7)]
    drop_old_versions(chain.run, chain.refs[6], keep=1)
    assert steps.uploads() == ["00007/policy-killed/shared/model"], "that one may go on"
    with pytest.raises(FileNotFoundError):
        killed[0].close()


def test_an_upload_of_an_old_version_that_goes_on_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that is made again, which is pinned first; its manifest comes last."""
    chain = Chain(tmp_path, SyncConfig(anchor_every=3))
    chain.publish(7)
    again = {name: tensor.clone() for name, tensor in reader.read(chain.refs[2])}
    drop_old_versions(chain.run, chain.refs[6], keep=1)

    class Trainer(TensorTrainer):
        def export(self) -> Iterator[tuple[str, torch.Tensor]]:
            for index, found in enumerate(super().export()):
                if index == 3:
                    while 2 not in steps_of(chain):  # the first file is being made durable
                        time.sleep(0.01)
                    drop_old_versions(chain.run, chain.refs[6], keep=1)
                yield found

    monkeypatch.setattr("infra.storage.safetensors.SHARD_BYTES", 64)
    stage = chain.run.stage("policy", 2, [])
    with holding(chain.run, chain.refs[2].uri):
        made = commit(Trainer(again), stage, CONFIG, None)
        assert digest_tensors(reader.read(made)) == chain.digests[2]
    drop_old_versions(chain.run, chain.refs[6], keep=1)
    assert steps_of(chain) == {0, 6}


def steps_of(chain: Chain) -> set[int]:
    """Numbers of the versions of which anything but a tombstone lies in the store."""
    keys = [key.split("/") for key in (Store.at(chain.run.store) / "runs/r/steps").keys()]
    return {int(key[0]) for key in keys if key[2] != "manifest.json"}
