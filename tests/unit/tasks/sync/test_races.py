"""A collection, beside one who pins a version, one who was cut off while publishing one, and another collection.

Every order of their calls of the store with two switches between them, and some with more.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from infra.errors import BadInput, Transient
from infra.policy import reader
from infra.policy.version import digest_tensors
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, ArtifactWriter, open_artifact
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tasks.sync.retention import drop_old_versions, pin, unpin
from tests.support.tensor_engine import TensorTrainer
from tests.support.turns import Schedule, Turns
from tests.unit.infra.policy.test_follow import Chain
from tests.unit.tasks.sync.test_crashes import MEMORY
from tests.unit.tasks.sync.test_retention import steps_of

CONFIG = SyncConfig(anchor_every=2)
OLD = 3
"""The version of which all is about: a delta to anchor 2. The head is 4."""


class World:
    """A run of five versions, and a sixth of the same number as OLD that was uploaded and not committed."""

    def __init__(self, folder: Path):
        self.chain = Chain(folder / "now", CONFIG)
        self.chain.publish(OLD)
        self.parent = self.chain.refs[-1]
        self.chain.publish()
        self.weights = {name: tensor.clone() for name, tensor in self.chain.trainer.tensors.items()}
        self.chain.publish()
        self.cut_off = self.chain.run.stage("policy", OLD, [], settings="cut off")
        with mock.patch.object(ArtifactWriter, "_commit", side_effect=Transient("cut off")), suppress(Transient):
            self.publish_after_cut()
        self._now, self._before = folder / "now", folder / "before"
        shutil.copytree(self._now, self._before)

    @property
    def stage(self) -> Stage:
        return self.chain.run.stage("policy", OLD, [])

    def restore(self) -> None:
        """As it was in the beginning."""
        shutil.rmtree(self._now)
        shutil.copytree(self._before, self._now)

    def collect(self) -> list[str]:
        return drop_old_versions(self.chain.run, self.chain.refs[-1], keep=1)

    def evaluate(self) -> ArtifactRef:
        """As flows/versions.py: pin the version, and make it again if it is gone; a task is retried."""
        found = pin(self.chain.run, "evaluation", self.chain.refs[OLD].uri)
        return found or self.retried(lambda: commit(TensorTrainer(self.weights), self.stage, CONFIG, None))

    def retried(self, act: Callable[[], ArtifactRef]) -> ArtifactRef:
        for _ in range(3):
            with suppress(Transient, OSError):
                return act()
        return act()

    def publish_after_cut(self) -> ArtifactRef:
        trainer = TensorTrainer(self.weights)
        trainer.members[0].committed = reader.mirror_of(self.parent)
        return commit(trainer, self.cut_off, CONFIG, self.parent)

    def check(self) -> None:
        """Whatever can be seen has all its files."""
        for stage in (self.stage, self.cut_off):
            if (ref := stage.committed()) is not None:
                artifact = open_artifact(ref)
                for name in artifact.names:
                    artifact.bytes(name)

    def check_collected(self) -> None:
        """Nothing is left, in the end, that nothing needs."""
        unpin(self.chain.run, "evaluation")
        self.collect()
        assert steps_of(self.chain) == {0, 4}
        assert self.collect() == []


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield World(Path(folder))


def orders(first: str, second: str, calls: dict[str, int]) -> Iterator[Schedule]:
    """All with at most two switches from one that has not ended."""
    for one, other in ((first, second), (second, first)):
        for before in range(calls[one]):
            for between in range(1, calls[other] + 1):
                yield [(one, before), (other, between), (one, 1000), (other, 1000)]


def test_a_version_that_was_pinned_and_found_or_made_again_stays(world: World) -> None:
    """Whether the pin came before the collection read the pins or just after, and however late the collection goes on."""
    processes = {"collection": world.collect, "evaluation": world.evaluate}
    world.restore()
    (calls := Turns([("collection", 1000)])).play(**processes)
    outcomes = []
    for schedule in orders(*processes, calls.calls):
        world.restore()
        found = Turns(schedule).play(**processes)
        ref = found["evaluation"]
        assert isinstance(ref, ArtifactRef) and isinstance(found["collection"], list), (schedule, found)
        assert digest_tensors(reader.read(ref)) == world.chain.digests[OLD], schedule
        outcomes.append(ref == world.chain.refs[OLD])
        if len(outcomes) % 10 == 0:
            world.collect()
            assert digest_tensors(reader.read(ref)) == world.chain.digests[OLD], schedule
            world.check_collected()
    assert 0 < sum(outcomes) < len(outcomes), "it was found, or gone and made again"


def test_a_publisher_that_was_cut_off_commits_all_files_or_nothing(world: World) -> None:
    processes = {"collection": world.collect, "publisher": world.publish_after_cut}
    world.restore()
    (calls := Turns([("publisher", 1000)])).play(**processes)
    outcomes = list[type]()
    for schedule in orders(*processes, calls.calls):
        world.restore()
        found = Turns(schedule).play(**processes)
        assert isinstance(found["publisher"], ArtifactRef | Transient | BadInput | OSError), (schedule, found)
        outcomes.append(type(found["publisher"]))
        world.check()
        if len(outcomes) % 10 == 0:
            world.check_collected()
    assert {ArtifactRef, Transient} <= set(outcomes)


@pytest.mark.parametrize("late", ["collection", "publisher"])
def test_who_was_suspended_while_the_version_was_collected_and_made_again_does_no_harm(world: World, late: str) -> None:
    """A collection that stops anywhere, and goes on when another has collected and an evaluation made the version again;
    a publisher of the old version, too."""
    processes = {
        "collection": world.collect,
        "publisher": world.publish_after_cut,
        "another": world.collect,
        "evaluation": world.evaluate,
    }
    del processes[{"collection": "publisher", "publisher": "collection"}[late]]
    world.restore()
    (calls := Turns([(late, 1000)])).play(**processes)
    for before in range(calls.calls[late]):
        world.restore()
        schedule = [(late, before), ("another", 1000), ("evaluation", 1000), (late, 1000)]
        found = Turns(schedule).play(**processes)
        assert isinstance(found["evaluation"], ArtifactRef), (schedule, found)
        for _ in range(2):
            assert digest_tensors(reader.read(found["evaluation"])) == world.chain.digests[OLD], schedule
            world.collect()
        world.check()
        world.check_collected()
