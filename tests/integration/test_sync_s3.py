"""Weight sync over a real S3 server that fails in every way that object stores do."""

import multiprocessing
import signal

import pytest
import torch

from infra.errors import Corrupted, Transient
from infra.policy import reader
from infra.policy.follow import follow
from infra.policy.version import digest_tensors
from infra.runs.run import Head, Run
from infra.storage import s3, safetensors
from infra.storage.artifacts import ArtifactRef, ArtifactWriter, open_artifact
from infra.storage.store import Store
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tasks.sync.retention import drop_old_versions
from tests.support.faulty_s3 import FAULTS, FaultyS3
from tests.support.tensor_engine import TensorEngine, TensorTrainer

CONFIG = SyncConfig(anchor_every=3, keep_versions=2)


pytestmark = pytest.mark.usefixtures("small_and_quick")


def trainer() -> TensorTrainer:
    """12 MB: an anchor goes up in several parts."""
    generator = torch.Generator().manual_seed(0)
    return TensorTrainer({f"t{i}": torch.randn(1000, 1000, generator=generator).bfloat16() for i in range(6)})


def train(trainer: TensorTrainer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in trainer.tensors.values():
        tensor.copy_(tensor.float() + 1e-3 * torch.randn(tensor.shape, generator=generator))


def test_versions_arrive_whole_whatever_the_store_does(faulty: FaultyS3) -> None:
    """One request in eight fails; a stage whose retries are spent is tried again, as its task is."""
    run, policies = Run(store="s3://test/faulty", name="r"), trainer()
    engine, head = TensorEngine(policies.tensors, torch.float32), None
    faulty.rate = 0.12
    for number in range(7):
        train(policies, number)
        expected = digest_tensors(policies.export())
        for attempt in range(4):
            try:
                parent = head.policy if head else None
                ref = commit(policies, run.stage("policy", number, []), CONFIG, parent)
                follow(engine, ref)
                head = run.advance(head, Head(step=number, update=ref, policy=ref))
                drop_old_versions(run, ref, CONFIG.keep_versions)
                break
            except Transient:
                assert attempt < 3
        assert engine.version == expected
        assert digest_tensors((n, t.bfloat16()) for n, t in engine.memory.items()) == expected
    faulty.rate = 0.0
    assert set(faulty.done) == set(FAULTS), "every kind of fault was met"
    assert engine.whole == 1
    fresh = TensorEngine(policies.tensors)
    assert head is not None
    follow(fresh, head.policy)
    assert digest_tensors(fresh.memory.items()) == engine.version


def test_a_store_that_is_down_is_given_up_within_a_bound(faulty: FaultyS3) -> None:
    faulty.rate, faulty.faults = 1.0, ("slow down",)
    with pytest.raises(Transient, match="s3://test/down/x"):
        Store.at("s3://test/down").read("x")
    assert faulty.requests["GET"] == s3.ATTEMPTS


def test_an_upload_goes_on_with_the_part_that_failed(faulty: FaultyS3) -> None:
    faulty.rate, faulty.faults = 0.5, ("reset", "lost reply", "slow down")
    faulty.random.seed(3)
    store, data = Store.at("s3://test/parts"), torch.arange(6 * 2**20, dtype=torch.int32)
    with ArtifactWriter(store, "x", "sample") as writer:
        writer.tensors("t", {"t": data})
    failed, puts = sum(faulty.done.values()), faulty.requests["PUT"]
    faulty.rate = 0.0
    assert torch.equal(open_artifact(writer.ref).tensors("t")["t"], data)
    assert failed > 0 and puts <= 5 + 2 + failed, "24 MiB in parts of 5, the manifest, and the failed ones again"


def test_a_publisher_that_dies_half_way_leaves_nothing_to_see(faulty: FaultyS3) -> None:
    run, policies = Run(store="s3://test/dies", name="r"), trainer()
    first = commit(policies, run.stage("policy", 0, []), CONFIG, None)
    train(policies, 1)
    faulty.rate, faulty.faults = 1.0, ("lost reply",)
    with pytest.raises(Transient):
        commit(policies, run.stage("policy", 1, []), CONFIG, first)
    faulty.rate = 0.0
    done = run.stage("policy", 1, []).committed()
    again: ArtifactRef = commit(policies, run.stage("policy", 1, []), CONFIG, first)
    assert done in (None, again)
    assert digest_tensors(reader.read(again)) == digest_tensors(policies.export())


def _publish_first(url: str) -> None:
    """In a process of its own: a version of three files."""
    safetensors.SHARD_BYTES = 2**22
    commit(trainer(), Run(store=url, name="r").stage("policy", 0, []), CONFIG, None)


def test_a_killed_publisher_run_again_uploads_only_what_is_not_there(
    faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, policies = "s3://test/killed", trainer()
    stage, size = Run(store=url, name="r").stage("policy", 0, []), 6 * 2_000_000
    publisher = multiprocessing.get_context("spawn").Process(target=_publish_first, args=(url,))
    faulty.after_write = lambda: publisher.kill() if faulty.written > size / 2 else None
    publisher.start()
    publisher.join()
    assert publisher.exitcode == -signal.SIGKILL and stage.committed() is None
    first, faulty.written, faulty.after_write = faulty.written, 0, None
    faulty.rate, faulty.faults = 0.3, ("stale list",)
    monkeypatch.setattr(safetensors, "SHARD_BYTES", 2**22)
    again = commit(policies, stage, CONFIG, None)
    faulty.rate = 0.0
    assert digest_tensors(reader.read(again)) == digest_tensors(policies.export())
    assert first >= 2 * size / 3 and faulty.written < size - first + 50_000, "the rest, and the manifest"


def test_a_damaged_delta_is_found_and_the_engine_keeps_its_version(faulty: FaultyS3) -> None:
    run, policies = Run(store="s3://test/damaged", name="r"), trainer()
    engine = TensorEngine(policies.tensors)
    refs = [commit(policies, run.stage("policy", 0, []), CONFIG, None)]
    follow(engine, refs[0])
    train(policies, 1)
    refs.append(commit(policies, run.stage("policy", 1, []), CONFIG, refs[0]))
    artifact = open_artifact(refs[1])
    key = artifact.manifest.place("delta-00000.bin")
    data = bytearray(artifact.store.read(key))
    data[len(data) // 2] ^= 1
    artifact.store.put(key, bytes(data))
    before = digest_tensors(engine.memory.items())
    with pytest.raises(Corrupted, match="delta-00000"):
        follow(engine, refs[1])
    assert engine.version == before == digest_tensors(engine.memory.items())
