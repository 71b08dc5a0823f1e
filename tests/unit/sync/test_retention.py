"""What is collected, and what must not be: all that a kept version is made of."""

from pathlib import Path

from infra import policy, policy_read
from infra.artifacts import ArtifactRef
from infra.follow import follow
from infra.store import Store
from tasks.sync.config import SyncConfig
from tasks.sync.retention import drop_old_versions, pin, unpin
from tests.unit.sync.engines import TensorEngine
from tests.unit.sync.test_follow import Chain, tensors


def left(chain: Chain) -> list[int]:
    def exists(ref: ArtifactRef) -> bool:
        return Store.at(ref.uri).size("manifest.json") is not None

    return [number for number, ref in enumerate(chain.refs) if exists(ref)]


def test_the_last_versions_and_what_they_are_made_of_stay(tmp_path: Path) -> None:
    chain = Chain(tmp_path, SyncConfig(anchor_every=4))
    chain.publish(11)
    drop_old_versions(chain.run, chain.refs[10], keep=2)
    assert left(chain) == [0, 8, 9, 10], "9 and 10 are made of anchor 8; version 0 always stays"
    assert drop_old_versions(chain.run, chain.refs[10], keep=2) == []
    for number in (0, 8, 9, 10):
        assert policy.digest_tensors(policy_read.read(chain.refs[number])) == chain.digests[number]


def test_what_a_pin_names_stays_until_it_is_dropped(tmp_path: Path) -> None:
    chain = Chain(tmp_path, SyncConfig(anchor_every=3))
    chain.publish(10)
    pin(chain.run, "engine-b", chain.refs[5])
    drop_old_versions(chain.run, chain.refs[9], keep=1)
    assert left(chain) == [0, 3, 4, 5, 9]
    engine = TensorEngine(tensors())
    follow(engine, chain.refs[5])
    assert engine.version == chain.digests[5]
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
    assert engine.version == policy.digest_tensors(engine.memory.items()) == chain.digests[7]
    assert engine.whole == 2
