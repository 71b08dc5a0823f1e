"""Weight sync into vLLM over two workers: each takes the changes of its own slices, and all of them or none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from infra.numerics.mxfp8 import Mxfp8Config
from infra.policy import reader
from infra.policy.follow import follow
from infra.policy.version import describe, digest_tensors
from infra.storage.artifacts import ArtifactRef
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tests.support import tiny_models
from tests.support.vllm_engines import PROBE, Maker, publish_versions, sampled


def one_kv_head(folder: Path, seed: int) -> Path:
    """Both workers hold all of k and v; and of 258 rows of the vocabulary one holds 160, the other 98."""
    return tiny_models.dense(folder, seed, num_key_value_heads=1)


CASES: dict[str, tuple[Maker, dict[str, Any]]] = {
    "tensor-parallel": (one_kv_head, {"tensor_parallel_size": 2}),
    "experts sliced": (tiny_models.experts, {"tensor_parallel_size": 2}),
    "beam": (tiny_models.beam, {"tensor_parallel_size": 2}),
    "pipeline-parallel": (tiny_models.dense, {"pipeline_parallel_size": 2}),
}


@pytest.fixture(params=CASES)
def settings(request: pytest.FixtureRequest, two_ranks_fit: None) -> tuple[Maker, RolloutConfig]:
    make, settings = CASES[request.param]
    return make, configured(**settings)


def configured(**settings: Any) -> RolloutConfig:
    return RolloutConfig(samples_per_prompt=2, max_new_tokens=8, kv_cache_gib=0.05, **{"dtype": "float32"} | settings)


_closed: list[RolloutEngine] = []
"""Kept to the end: vLLM leaves sockets of its queues to workers open, and collecting their ZeroMQ context waits for ever."""


@contextmanager
def started(folder: Path, config: RolloutConfig, mxfp8: Mxfp8Config | None = None) -> Iterator[RolloutEngine]:
    """One at a time: workers that are forked beside another engine's hold its pipes open."""
    engine = RolloutEngine(str(folder), config, mxfp8=mxfp8)
    try:
        yield engine
    finally:
        engine.close()
        _closed.append(engine)


def break_after(worker: Any, rank: int, patches: int) -> None:
    """In the worker `rank` of two, writes fail after so many tensors, until `mend`."""
    from tasks.rollout.weights.sparse_update import Patch

    if worker.rank != rank:
        return
    write, left = Patch.write, [patches]

    def breaking(self: Patch, values: Any) -> None:
        left[0] -= 1
        write(self, values)
        if left[0] == -1:
            raise RuntimeError(f"in the middle of an apply, in worker {rank}")

    Patch.write = breaking
    worker.mend = lambda: setattr(Patch, "write", write)


def break_loading(worker: Any, rank: int) -> None:
    """In the worker `rank` of two, vLLM's loader fails on its way, until `mend`."""
    if worker.rank != rank:
        return
    model = worker.model_runner.model
    load = model.load_weights

    def breaking(tensors: Any) -> None:
        load(list(tensors)[:-3])
        raise RuntimeError(f"in the middle of loading, in worker {rank}")

    model.load_weights = breaking
    worker.mend = lambda: model.__dict__.pop("load_weights")


def mend(worker: Any) -> None:
    """Undo what broke."""
    if hasattr(worker, "mend"):
        worker.__dict__.pop("mend")()


def flip(worker: Any, name: str, rank: int) -> None:
    """Change one element of a tensor in the worker `rank`."""
    if worker.rank == rank:
        worker.policy_slices[name].slot.memory[0] += 1


def assert_holds(engine: RolloutEngine, ref: ArtifactRef) -> None:
    """The mirror is the version, and all slices are the mirror's, by digest."""
    mirror = engine._sink.mirror
    held = digest_tensors((name, mirror.tensor(name)) for name in mirror.names)
    assert held == engine.version == describe(ref).policy_digest
    assert engine._sink.differing() == []


def test_deltas_reach_the_workers_slices_and_a_fault_in_one_leaves_all_as_they_were(
    settings: tuple[Maker, RolloutConfig], tmp_path: Path
) -> None:
    make, config = settings
    folder, last, refs = publish_versions(make, tmp_path)
    with started(last, config) as fresh:
        expected, expected_samples = fresh.token_logprobs(PROBE), sampled(fresh)
    with started(folder, config) as engine:
        follow(engine, refs[0])
        first, first_samples = engine.token_logprobs(PROBE), sampled(engine)
        for rank in (0, 1):
            engine._llm.collective_rpc(break_loading, args=(rank,))
            with pytest.raises(RuntimeError, match=f"in the middle of loading, in worker {rank}"):
                engine.apply(load_file(last / "model.safetensors").items(), "last")
            engine._llm.collective_rpc(mend)
            assert engine.version == describe(refs[0]).policy_digest
            assert engine._sink.differing() == [] and engine.token_logprobs(PROBE) == first
        with mock.patch.object(engine, "prepare_whole", side_effect=AssertionError("only changes may come")):
            for rank, patches in ((0, 3), (1, 7)):
                engine._llm.collective_rpc(break_after, args=(rank, patches))
                with pytest.raises(RuntimeError, match=f"in the middle of an apply, in worker {rank}"):
                    follow(engine, refs[1])
                engine._llm.collective_rpc(mend)
                assert engine.version == describe(refs[0]).policy_digest
                assert engine._sink.differing() == [], "all slices are the old version's, by digest"
                assert engine.token_logprobs(PROBE) == first and sampled(engine).equals(first_samples)
            for ref in refs[1:]:
                follow(engine, ref)
        assert engine.token_logprobs(PROBE) == expected != first
        assert sampled(engine).equals(expected_samples)
        assert_holds(engine, refs[-1])
        engine._llm.collective_rpc(flip, args=("model.norm.weight", 1))
        assert engine._sink.differing() == ["model.norm.weight"], "or this check shows nothing"


@pytest.mark.usefixtures("two_ranks_fit")
def test_experts_that_are_dealt_out_get_their_changes(tmp_path: Path) -> None:
    """By digests alone: vLLM's CPU kernel cannot compute with expert parallelism (it crashes)."""
    folder, _, refs = publish_versions(tiny_models.experts, tmp_path)
    config = configured(tensor_parallel_size=2, engine={"enable_expert_parallel": True})
    with started(folder, config) as engine:
        follow(engine, refs[0])
        with mock.patch.object(engine, "prepare_whole", side_effect=AssertionError("only changes may come")):
            for ref in refs[1:]:
                follow(engine, ref)
        assert_holds(engine, refs[-1])
        held = engine._llm.collective_rpc(held_experts)
        assert held == [{0, 1, 2, 3}, {4, 5, 6, 7}]


@pytest.mark.usefixtures("two_ranks_fit")
def test_an_engine_in_mxfp8_over_two_workers_follows_by_what_changed(tmp_path: Path) -> None:
    """Loaded whole from its mirror: once, however many versions it goes over; in all workers or in none."""
    mxfp8, config = Mxfp8Config(emulation=True), configured(tensor_parallel_size=2)
    wide_enough: Maker = lambda folder, seed: tiny_models.dense(folder, seed, intermediate_size=128)  # noqa: E731
    folder, last, refs = publish_versions(wide_enough, tmp_path, mxfp8)
    with started(last, config, mxfp8) as fresh:
        expected = fresh.token_logprobs(PROBE)
    with started(folder, config, mxfp8) as engine:
        own = engine.token_logprobs(PROBE)
        follow(engine, refs[0])
        assert engine.token_logprobs(PROBE) == own != expected
        loads = mock.Mock(wraps=engine._sink._sink.commit)
        with (
            mock.patch.object(reader, "read", side_effect=AssertionError("only changes are read")),
            mock.patch.object(engine._sink._sink, "commit", loads),
        ):
            follow(engine, refs[1])
            before = engine.token_logprobs(PROBE)
            engine._llm.collective_rpc(break_loading, args=(1,))
            with pytest.raises(RuntimeError, match="in the middle of loading, in worker 1"):
                follow(engine, refs[-1])
            engine._llm.collective_rpc(mend)
            assert engine.version == describe(refs[1]).policy_digest
            assert engine.token_logprobs(PROBE) == before != own
            follow(engine, refs[-1])
        assert loads.call_count == 3
        assert engine.token_logprobs(PROBE) == expected


def held_experts(worker: Any) -> set[int]:
    """The experts of which the worker has slices."""
    return {int(name.split(".experts.")[1].split(".")[0]) for name in worker.policy_slices if ".experts." in name}
