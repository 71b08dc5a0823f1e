"""An engine comes to a version by what changed, and holds it bit for bit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch

from infra.errors import Corrupted, Transient
from infra.policy import reader
from infra.policy.follow import Prefetch, follow, prefetch
from infra.policy.version import describe, digest_tensors
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef
from infra.storage.store import Store
from tasks.rollout.weights.mirrored_sink import MirroredSink
from tasks.rollout.weights.sparse_update import Patch
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tasks.sync.retention import drop_old_versions
from tests.support.tensor_engine import TensorEngine, TensorTrainer

CONFIG = SyncConfig(anchor_every=4)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 64, generator=generator).mul(0.02).bfloat16(),
        "norm": torch.ones(64).bfloat16(),
        "router": torch.randn(8, 64, generator=generator).mul(0.02),
        "scalar": torch.tensor(1.5),
    }


def step(weights: dict[str, torch.Tensor], seed: int, lr: float = 1e-4) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        moved = tensor.float() + lr * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(moved)


class Chain:
    """Versions of one trainer."""

    def __init__(self, folder: Path, config: SyncConfig = CONFIG):
        self.run = Run(store=f"file://{folder}/store", name="r")
        self.trainer = TensorTrainer(tensors())
        self.config = config
        self.refs: list[ArtifactRef] = []
        self.digests: list[str] = []

    def publish(self, count: int = 1) -> ArtifactRef:
        for _ in range(count):
            number = len(self.refs)
            if number:
                step(self.trainer.tensors, number)
            stage = self.run.stage("policy", number, [])
            self.refs.append(commit(self.trainer, stage, self.config, self.refs[-1] if self.refs else None))
            self.digests.append(digest_tensors(self.trainer.export()))
        return self.refs[-1]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def held(engine: TensorEngine, like: dict[str, torch.Tensor]) -> str:
    return digest_tensors((name, engine.memory[name].to(tensor.dtype)) for name, tensor in like.items())


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["own", "float32"])
def test_an_engine_goes_from_version_to_version_by_what_changed(chain: Chain, dtype: torch.dtype | None) -> None:
    engine = TensorEngine(tensors(), dtype)
    for number in range(6):
        follow(engine, chain.publish())
        assert engine.version == chain.digests[number] == held(engine, chain.trainer.tensors)
    assert engine.whole == 1, "only version 0 came whole"


def test_a_fresh_engine_takes_the_cheapest_chain(chain: Chain) -> None:
    chain.publish(7)
    assert [what.version for _, what in reader.chain(chain.refs[6])] == [4, 5, 6]
    assert [what.version for _, what in reader.chain(chain.refs[4])] == [4]
    assert [what.version for _, what in reader.chain(chain.refs[6], chain.digests[3])] == [4, 5, 6]
    assert reader.chain(chain.refs[6], chain.digests[6]) == []
    engine = TensorEngine(tensors())
    follow(engine, chain.refs[6])
    assert engine.version == held(engine, chain.trainer.tensors) == chain.digests[6]


def test_an_engine_that_lags_catches_up_through_the_versions_between(chain: Chain) -> None:
    engine = TensorEngine(tensors())
    follow(engine, chain.publish(2))
    follow(engine, chain.publish(3))
    assert engine.version == held(engine, chain.trainer.tensors) == chain.digests[4]
    assert engine.whole == 1


def test_an_engine_goes_back_to_an_older_version(chain: Chain) -> None:
    engine = TensorEngine(tensors())
    follow(engine, chain.publish(4))
    follow(engine, chain.refs[1])
    assert engine.version == chain.digests[1]
    assert digest_tensors(engine.memory.items()) == chain.digests[1]


def test_an_engine_whose_weights_were_disturbed_gets_the_version_whole(chain: Chain) -> None:
    engine = TensorEngine(tensors())
    follow(engine, chain.publish(2))
    engine.memory["embed"][3, 5] += 1
    follow(engine, chain.publish())
    assert engine.whole == 2 and held(engine, chain.trainer.tensors) == chain.digests[2]


def test_an_engine_in_fewer_bits_than_the_policy_still_takes_changes(chain: Chain) -> None:
    engine = TensorEngine(tensors(), torch.bfloat16)
    for _ in range(4):
        follow(engine, chain.publish())
    assert engine.whole == 1
    assert all(torch.equal(engine.memory[n], t.bfloat16()) for n, t in chain.trainer.tensors.items())


class OpaqueEngine(TensorEngine):
    """As an engine over several workers: it cannot tell its weights, and takes no changes."""

    def words(self, name: str, dtype: torch.dtype) -> None:
        return None

    def prepare(self, changes: Any) -> Any:
        raise AssertionError("it was given changes")


def test_an_engine_that_cannot_tell_its_weights_gets_versions_whole(chain: Chain) -> None:
    engine = OpaqueEngine(tensors())
    for number in range(3):
        follow(engine, chain.publish())
        assert engine.version == held(engine, chain.trainer.tensors) == chain.digests[number]
    assert engine.whole == 3


def test_a_version_that_was_collected_and_made_again_closes_no_way(chain: Chain) -> None:
    """Made again it is full, another artifact in the old one's place: the refs of later versions are to the old one."""
    chain.publish(4)
    made = TensorTrainer({name: tensor.clone() for name, tensor in chain.trainer.tensors.items()})
    chain.publish(3)  # 4 is an anchor
    assert drop_old_versions(chain.run, chain.refs[6], keep=2)
    again = commit(made, chain.run.stage("policy", 3, []), CONFIG, None)
    assert again.uri == chain.refs[3].uri and again.digest != chain.refs[3].digest
    assert describe(again).policy_digest == chain.digests[3]
    with pytest.raises(Corrupted, match="another artifact"):
        describe(chain.refs[3])

    for have in (None, chain.digests[1]):
        assert [what.version for _, what in reader.chain(chain.refs[6], have)] == [4, 5, 6]
    fresh, engine = TensorEngine(tensors()), TensorEngine(tensors())
    follow(fresh, chain.refs[6])
    follow(engine, again)
    follow(engine, chain.refs[6])
    for one in (fresh, engine):
        assert one.version == held(one, chain.trainer.tensors) == chain.digests[6] and one.whole == 1
    drop_old_versions(chain.run, chain.refs[6], keep=4)  # would keep 3, if it were the parent of 4
    assert chain.run.stage("policy", 3, []).committed() is None
    chain.trainer.become(1)
    follow(engine, chain.publish())
    assert engine.version == held(engine, chain.trainer.tensors) == chain.digests[7]


@pytest.mark.parametrize("before", ["infra.policy.reader.changes", "infra.storage.artifacts.Artifact.buffer"])
def test_an_engine_whose_way_is_collected_while_it_reads_gets_the_version_whole(chain: Chain, before: str) -> None:
    engine = TensorEngine(tensors())
    follow(engine, chain.publish(3))
    chain.publish(3)
    assert [what.version for _, what in reader.chain(chain.refs[5], chain.digests[2])] == [3, 4, 5]
    act, dropped = resolve_name(before), list[str]()

    def collecting(*arguments: Any, **named: Any) -> Any:
        dropped.extend(drop_old_versions(chain.run, chain.refs[5], keep=1))
        return act(*arguments, **named)

    with mock.patch(before, collecting):
        follow(engine, chain.refs[5])
    assert len(dropped) == 3 and engine.whole == 2
    assert engine.version == held(engine, chain.trainer.tensors) == chain.digests[5]


def test_a_trainer_that_lost_its_mirror_publishes_the_same_version(chain: Chain, tmp_path: Path) -> None:
    other = Chain(tmp_path / "other")
    chain.publish(4)
    for _ in range(4):
        other.trainer.become(1)
        other.publish()
    assert [ref.digest for ref in chain.refs] == [ref.digest for ref in other.refs]


def test_the_processes_of_a_trainer_each_write_their_share(chain: Chain, tmp_path: Path) -> None:
    """Whole versions, deltas and anchors; in the end they are as many as never before, and read what others coded."""
    other = Chain(tmp_path / "other")
    other.trainer.become(3)
    engine = TensorEngine(tensors())
    for number in range(7):
        if number == 5:
            other.trainer.become(2)
        chain.publish()
        follow(engine, other.publish())
        assert engine.version == held(engine, other.trainer.tensors) == chain.digests[number]
        what = describe(other.refs[number])
        for process in other.trainer.members if number else []:
            assert process.committed is not None and process.committed.ref == other.refs[number]
        names = [name for process in other.trainer.members if process.committed for name in process.committed.names]
        assert sorted(names) == (sorted(what.tensors) if number else [])
        files = {entry.file for entry in what.frames or []} | {info.file for info in what.tensors.values()}
        assert len(files - {None}) >= (2 if number else 1), "no process writes all"
    assert engine.whole == 1
    assert digest_tensors(reader.read(other.refs[6])) == chain.digests[6]


def test_a_share_is_read_through_frames_in_which_other_tensors_come_and_go(chain: Chain) -> None:
    """`small` comes with `large` in version 1, is left out with `other` in 2, and changes again in 3: what it is there is not
    to be made of what it was in 1."""
    trainer = chain.trainer
    sizes = {"large": 4000, "small": 1000, "other": 1000, "third": 1000}
    generator = torch.Generator().manual_seed(0)
    trainer.tensors = {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}
    chain.publish()
    changed = [(["large", "small", "third"], 0.01), (["small", "other"], 10.0), (["small", "third"], 0.01)]
    for number, (names, lr) in enumerate(changed, 1):
        for name in names:
            trainer.tensors[name] += lr * torch.randn(sizes[name], generator=generator)
        stage = chain.run.stage("policy", number, [])
        chain.refs.append(commit(trainer, stage, SyncConfig(anchor_every=9), chain.refs[-1]))
    assert [what.version for _, what in reader.chain(chain.refs[3])] == [0, 1, 2, 3]
    for names in (set(names) for count in range(5) for names in combinations(sizes, count)):
        mirror = reader.mirror_of(chain.refs[3], names=names)
        assert set(mirror.names) == names
        assert all(torch.equal(mirror.tensor(name), trainer.tensors[name]) for name in names)
    trainer.become(2)
    trainer.tensors["large"] += 1
    ref = commit(trainer, chain.run.stage("policy", 4, []), CONFIG, chain.refs[3])
    assert describe(ref).policy_digest == digest_tensors(trainer.export())


def test_a_version_is_published_once(chain: Chain) -> None:
    chain.publish(2)
    stage = chain.run.stage("policy", 1, [])
    assert commit(chain.trainer, stage, CONFIG, chain.refs[0]) == chain.refs[1]


def test_two_workers_at_once_publish_one_version(chain: Chain) -> None:
    first, start = chain.publish(), threading.Barrier(4)
    step(chain.trainer.tensors, 1)

    def work(_: int) -> tuple[ArtifactRef, TensorTrainer]:
        trainer = TensorTrainer(chain.trainer.tensors)
        start.wait()
        return commit(trainer, chain.run.stage("policy", 1, []), CONFIG, first), trainer

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(work, range(4)))
    assert len({ref.digest for ref, _ in done}) == 1
    store = Store.at(chain.run.store) / "runs/r/steps/00001"
    assert [key.split("/")[-1] for key in store.keys()].count("manifest.json") == 1
    step(chain.trainer.tensors, 2)
    for ref, trainer in done:  # each can go on from it, with the mirror that it has
        commit(trainer, chain.run.stage("policy", 2, []), CONFIG, ref)
    engine = TensorEngine(tensors())
    found = chain.run.stage("policy", 2, []).committed()
    assert found is not None
    follow(engine, found)
    assert held(engine, chain.trainer.tensors) == digest_tensors(chain.trainer.export())


def test_an_update_is_prepared_while_the_engine_works(chain: Chain) -> None:
    engine = TensorEngine(tensors(), torch.float32)
    follow(engine, chain.publish())
    prefetch(engine, chain.publish())
    assert engine.prefetched is not None
    engine.prefetched.wait()
    assert engine.version == held(engine, tensors()) == chain.digests[0], "nothing has changed yet"
    follow(engine, chain.refs[1])
    assert engine.version == held(engine, chain.trainer.tensors) == chain.digests[1]


def test_what_was_prepared_for_another_version_is_not_used(chain: Chain) -> None:
    engine = TensorEngine(tensors())
    follow(engine, chain.publish())
    chain.publish(2)
    prefetch(engine, chain.refs[1])
    follow(engine, chain.refs[2])
    assert engine.version == held(engine, chain.trainer.tensors) == chain.digests[2]
    prefetch(engine, chain.refs[1])
    prefetch(engine, chain.refs[2])
    follow(engine, chain.refs[2])
    assert engine.version == chain.digests[2]


class LoadingEngine:
    """As a quantised engine: it takes whole policies only, and the version is kept in a mirror."""

    loads_whole = True

    def __init__(self, like: dict[str, torch.Tensor]):
        self.loader: Any = TensorEngine(like)
        self.version: str | None = None
        self.prefetched: Prefetch | None = None
        self.sink = MirroredSink(self.loader, iter)
        self.words, self.prepare = self.sink.words, self.sink.prepare
        self.prepare_whole, self.prepare_adapter = self.sink.prepare_whole, self.loader.prepare_adapter

    def commit(self, update: Any, version: str) -> None:
        self.sink.commit(update, version)
        self.version = version

    def check(self, digest: str) -> None:
        """Its own weights and the mirror's are those of the version that it says it holds."""
        mirror = self.sink.mirror
        assert mirror is not None and self.version == digest
        for tensors in (self.loader.memory, {name: mirror.tensor(name) for name in mirror.names}):
            assert digest_tensors(tensors.items()) == digest


@pytest.fixture
def loading(chain: Chain) -> LoadingEngine:
    """At version 0, with versions 1 to 4 to come."""
    engine = LoadingEngine(tensors())
    follow(engine, chain.publish())
    chain.publish(3)
    return engine


def test_an_engine_that_loads_whole_policies_goes_over_several_versions_by_one_load(
    chain: Chain, loading: LoadingEngine
) -> None:
    with mock.patch.object(reader, "read", side_effect=AssertionError("only changes are read")):
        follow(loading, chain.refs[3])
        loading.check(chain.digests[3])
        assert loading.loader.whole == 2
        chain.publish(2)
        prefetch(loading, chain.refs[5])
        follow(loading, chain.refs[5])
    loading.check(chain.digests[5])
    assert loading.loader.whole == 3


def test_a_load_over_several_versions_that_fails_leaves_the_old_one_and_its_mirror(
    chain: Chain, loading: LoadingEngine
) -> None:
    for at in range(3):  # the norm stays as it is
        left, write = [at], Patch.write

        def breaking(patch: Patch, values: torch.Tensor, left: list[int] = left, write: Any = write) -> None:
            write(patch, values)
            left[0] -= 1
            if left[0] == -1:
                raise RuntimeError("in the middle of a load")

        with mock.patch.object(Patch, "write", breaking), pytest.raises(RuntimeError, match="middle"):
            follow(loading, chain.refs[3])
        loading.check(chain.digests[0])
    with (
        mock.patch.object(Store, "buffer", side_effect=Transient("the store is gone")),
        pytest.raises(Transient),
    ):
        follow(loading, chain.refs[3])
    loading.check(chain.digests[0])
    follow(loading, chain.refs[3])
    loading.check(chain.digests[3])


def test_a_mirror_that_was_disturbed_gets_the_version_from_the_store(chain: Chain, loading: LoadingEngine) -> None:
    assert loading.sink.mirror is not None
    loading.sink.mirror.tensor("embed")[3, 5] += 1
    follow(loading, chain.refs[3])
    loading.check(chain.digests[3])
