"""A version whose tensors were collected is made again, by its own run's settings, and kept while it is used."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flows.config import TrainConfig
from flows.session import Session
from flows.versions import find_version, policy_of
from infra.engines.spec import EngineSpec
from infra.orchestration.progress import Progress
from infra.policy.version import describe
from infra.runs.run import Head, Run
from infra.storage.artifacts import ArtifactRef
from tasks.sync.commit import commit
from tasks.sync.retention import drop_old_versions, pinned
from tasks.sync.task import commit_policy
from tasks.update.resident import follow, update
from tests.integration.test_resident_trainer import scored
from tests.support.models import write_tiny_llama
from tests.support.pipeline import TINY


class InProcess:
    """Calls an engine as its actor does, in this process."""

    def __init__(self, spec: EngineSpec[Any], version: ArtifactRef, timeout_s: float | None):
        self.spec, self.version = spec, version

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine = self.spec.loader.load()
        self.spec.loader.follow(engine, self.version)
        return function(engine, *args, **kwargs)


@pytest.fixture(autouse=True)
def in_process() -> Iterator[None]:
    with (
        mock.patch("tasks.sync.task.Engine", InProcess),
        mock.patch("flows.session.Engine"),
        mock.patch("flows.versions.commit_policy", commit_policy.fn),
    ):
        yield


class Trained:
    """A run of six steps, version by version, with a checkpoint after step 4; its old versions are collected."""

    def __init__(self, folder: Path, model: Path, name: str, lr: float):
        settings = TINY | {
            "update": {"lr": lr, "microbatch_tokens": 64},
            "sync": {"anchor_every": 3, "keep_versions": 1},
        }
        self.config = TrainConfig(model=str(model), **settings)
        self.run = Run(store=f"file://{folder}/store", name=name)
        self.run.open(self.config.identity() | {"model_fingerprint": "f"})
        self.session = Session(
            self.config, self.run, str(model), "f", 260, False, Progress(), mock.Mock(), f"{name}/visit", 64
        )
        self.digests: list[str] = []
        with self.run.stage("base", 0, []).write("update") as writer:
            pass
        self.train(writer.ref)

    def train(self, base: ArtifactRef) -> None:
        trainer = self.session.trainer.loader.load()
        head: Head | None = None
        for number in range(7):
            at = base if head is None else head.update
            follow(trainer, at)
            if head is not None:
                with self.run.stage("reward", number, []).write("scored") as writer:
                    writer.table("scored", scored(number))
                stage = self.run.stage("update", number - 1, [at, writer.ref])
                at = update(trainer, stage, writer.ref, checkpoint=number == 4)
            stage = self.run.stage("policy", number, [at])
            made = commit(trainer, stage, self.config.sync, head.policy if head else None)
            self.digests.append(describe(made).policy_digest)
            head = self.run.advance(head, Head(step=number, update=at, policy=made))
        trainer.finish_saving()
        self.collect()

    def collect(self) -> None:
        head = self.run.head()
        assert head is not None
        drop_old_versions(self.run, head.policy, self.config.sync.keep_versions)

    def is_kept(self, number: int) -> bool:
        version = find_version(self.run, number)
        return self.run.stage("policy", number, [version.update]).committed() is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def test_a_collected_version_is_made_again_bit_for_bit_and_kept_while_it_is_used(tmp_path: Path, model: Path):
    trained = Trained(tmp_path, model, "r", 1e-3)
    assert [trained.is_kept(number) for number in range(7)] == [True, *[False] * 5, True]
    assert len(set(trained.digests)) == 7
    for number in (5, 2):  # from the checkpoint, and from the base
        what = describe(policy_of(trained.session, find_version(trained.run, number)))
        assert (what.version, what.form, what.policy_digest) == (number, "full", trained.digests[number])
    policy_of(trained.session, find_version(trained.run, None))
    trained.collect()
    assert trained.is_kept(5) and trained.is_kept(2) and len(pinned(trained.run)) == 3
    trained.session.holds.close()
    trained.collect()
    assert not trained.is_kept(5) and not trained.is_kept(2) and pinned(trained.run) == set()


def test_a_baseline_of_another_run_is_made_by_that_run_s_settings(tmp_path: Path, model: Path):
    ours, theirs = Trained(tmp_path, model, "ours", 1e-3), Trained(tmp_path, model, "theirs", 3e-3)
    assert ours.digests[2] != theirs.digests[2]
    with ours.session.holds:
        made = policy_of(ours.session, find_version(theirs.run, 2))
        assert describe(made).policy_digest == theirs.digests[2]
        assert pinned(theirs.run) == {made.uri} and pinned(ours.run) == set()
    assert pinned(theirs.run) == set()
