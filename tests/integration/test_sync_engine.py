"""Weight sync into real vLLM, dense and with experts: by what changed, in place, and the same as freshly loaded."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from infra.errors import BadInput
from infra.numerics.mxfp8 import quantize_tensors
from infra.policy import reader
from infra.policy.follow import follow, prefetch
from infra.policy.version import describe, dtype_of
from infra.runs.run import Run
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tasks.rollout.weights.sparse_update import Patch
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.support.tensor_engine import TensorTrainer
from tests.support.vllm_engines import FAMILIES, PROBE, PROMPTS, Versions, sampled

TRANSFER = {"weight_transfer_config": {"backend": "policyflow"}}
SETTINGS = RolloutConfig(samples_per_prompt=2, max_new_tokens=40, kv_cache_gib=0.05, dtype="float32", engine=TRANSFER)


@pytest.fixture(scope="module", **FAMILIES)
def versions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    made = Versions(request.param, tmp_path_factory.mktemp("model"), SETTINGS)
    yield made
    made.close()


@pytest.fixture
def engine(versions: Versions) -> RolloutEngine:
    """The engine at version 0."""
    follow(versions.engine, versions.refs[0])
    return versions.engine


def test_deltas_lead_to_what_a_fresh_engine_loads_bit_for_bit(versions: Versions, engine: RolloutEngine) -> None:
    before = sampled(engine)
    with mock.patch.object(engine, "prepare_whole", side_effect=AssertionError("only changes may come")):
        for ref in versions.refs[1:]:
            follow(engine, ref)
    assert engine.token_logprobs(PROBE) == versions.fresh.token_logprobs(PROBE)
    assert sampled(engine).equals(sampled(versions.fresh)) and not before.equals(sampled(engine))
    what = describe(versions.refs[-1])
    held = engine.digests({name: dtype_of(info) for name, info in what.tensors.items()})
    assert held == {name: info.digest for name, info in what.tensors.items()}


def test_bytes_that_change_are_those_that_are_written(versions: Versions, engine: RolloutEngine) -> None:
    written: list[int] = []
    commit = engine.commit

    def counting(update: Any, version: str) -> None:
        written.append(sum(patch.new.numel() for patch in update.patches))
        commit(update, version)

    with mock.patch.object(engine, "commit", counting):
        follow(engine, versions.refs[1])
    old, new = (dict(reader.read(ref)) for ref in versions.refs[:2])
    assert written == [sum(int((old[name] != new[name]).sum()) for name in old)]


@pytest.mark.parametrize("at", [0, 7, 20])
def test_an_apply_that_breaks_off_leaves_the_old_version(versions: Versions, engine: RolloutEngine, at: int) -> None:
    before, left, write = sampled(engine), [at], Patch.write

    def breaking(self: Patch, values: torch.Tensor) -> None:
        left[0] -= 1
        write(self, values)
        if left[0] == -1:
            raise RuntimeError("in the middle of an apply")

    with mock.patch.object(Patch, "write", breaking), pytest.raises(RuntimeError, match="in the middle"):
        follow(engine, versions.refs[1])
    assert engine.version == describe(versions.refs[0]).policy_digest
    assert sampled(engine).equals(before)
    follow(engine, versions.refs[4])
    assert engine.token_logprobs(PROBE) == versions.fresh.token_logprobs(PROBE)


def test_vllm_s_loader_that_breaks_off_leaves_the_old_version(versions: Versions, engine: RolloutEngine) -> None:
    """The way of models that have no slots, as quantized ones."""
    before, version = sampled(engine), engine.version
    model: Any = engine._llm.collective_rpc(lambda worker: worker.model_runner.model)[0]
    load = type(model).load_weights

    def breaking(self: Any, tensors: Any) -> None:
        load(self, list(tensors)[:-3])
        raise RuntimeError("in the middle of loading")

    with mock.patch.object(engine._sink, "slots", {}):
        with mock.patch.object(type(model), "load_weights", breaking), pytest.raises(RuntimeError, match="middle"):
            follow(engine, versions.refs[4])
        assert engine.version == version and sampled(engine).equals(before)
        follow(engine, versions.refs[4])
        assert engine.token_logprobs(PROBE) == versions.fresh.token_logprobs(PROBE)


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_requests_in_flight_go_on_under_the_new_weights(
    versions: Versions, engine: RolloutEngine, in_flight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared in a thread while sampling, committed between two steps of it. Three of six requests are in flight at the
    switch, the others are admitted after it: where samples fork, the prompts' second ones."""
    monkeypatch.setattr(engine, "config", SETTINGS.model_copy(update={"in_flight": in_flight}))
    monkeypatch.setattr(scheduler_of(engine), "max_num_running_reqs", 3)
    steps, step, started = [0], engine._llm.llm_engine.step, threading.Event()

    def counting() -> Any:
        outputs = step()
        steps[0] += 1
        if steps[0] == 8:
            started.set()
            swapped.wait(60)
        return outputs

    swapped, tables = threading.Event(), []
    monkeypatch.setattr(engine._llm.llm_engine, "step", counting)
    thread = threading.Thread(target=lambda: tables.append(engine.sample(PROMPTS, seed=1, temperature=0)[0]))
    prefetch(engine, versions.refs[4])
    thread.start()
    assert started.wait(60)
    follow(engine, versions.refs[4])
    swapped.set()
    thread.join(60)
    assert not thread.is_alive() and steps[0] > 20
    assert max(map(len, tables[0]["response_ids"].to_pylist())) > 20, "some were in flight at the switch"
    for index, row in enumerate(tables[0].to_pylist()):
        ids, count = row["prompt_ids"] + row["response_ids"], len(row["response_ids"])
        scored = versions.fresh.token_logprobs([ids])[0][-count:]
        apart = [abs(a - b) for a, b in zip(row["logprobs"], scored, strict=True)]
        if row["sample"] == 1 if engine._forks else index >= 3:
            assert max(apart) < 1e-4, "of the new weights, with no KV of the old ones"
        elif len(apart) > 20:
            assert max(apart[:8]) > 1e-3, "before the switch, of the old weights"
            if in_flight == "recompute":
                assert max(apart[10:]) < 1e-4, "after the switch, everything is of the new weights"
            else:
                assert max(apart[10:]) > 1e-3, "it has kept its KV"
    assert engine.token_logprobs(PROBE) == versions.fresh.token_logprobs(PROBE), "no KV of the old weights is left"


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_no_request_takes_over_kv_of_old_weights(
    versions: Versions, engine: RolloutEngine, in_flight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time, of one call, with common prefixes: during the first, new weights come. The second would find
    its first block, the third the block that it has completed under the new weights, on top of KV of the old ones."""
    monkeypatch.setattr(engine, "config", SETTINGS.model_copy(update={"in_flight": in_flight}))
    monkeypatch.setattr(scheduler_of(engine), "max_num_running_reqs", 1)
    from vllm import SamplingParams

    step, prefix = engine._llm.llm_engine.step, PROBE[0][:40]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0, detokenize=False)

    def generate(*prompts: list[int]) -> list[Any]:
        follow(engine, versions.refs[0])
        steps = [0]

        def switching() -> Any:
            outputs = step()
            steps[0] += 1
            if steps[0] == 8:
                follow(engine, versions.refs[4])
            return outputs

        monkeypatch.setattr(engine._llm.llm_engine, "step", switching)
        outputs = engine._generate(list(prompts), [params] * len(prompts), fork=False)
        monkeypatch.setattr(engine._llm.llm_engine, "step", step)
        return [output.outputs[0] for output in outputs]

    first = list(generate([*prefix, 1])[0].token_ids)
    prompts = [[*prefix, 1], [*prefix, 2], [*prefix, 1, *first]]
    apart = []
    for prompt, output in zip(prompts, generate(*prompts), strict=True):
        ids = list(output.token_ids)
        assert len(ids) == 30
        scored = versions.fresh.token_logprobs([prompt + ids])[0][-30:]
        found = [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)]
        apart.append([abs(a - b) for a, b in zip(found, scored, strict=True)])
    assert max(apart[0][:8]) > 1e-3 and (max(apart[0][9:]) > 1e-3) == (in_flight == "keep")
    assert max(apart[1]) < 1e-4 and max(apart[2]) < 1e-4


def scheduler_of(engine: RolloutEngine) -> Any:
    return engine._llm.llm_engine.engine_core.engine_core.scheduler


def test_a_stock_vllm_takes_versions_through_its_weight_transfer(versions: Versions, engine: RolloutEngine) -> None:
    llm, refs = engine._llm, [json.loads(ref.model_dump_json()) for ref in versions.refs]
    llm.init_weight_transfer_engine({"init_info": {"prefetch": refs[0]}})
    for ref in (refs[0], refs[1], refs[4]):
        llm.init_weight_transfer_engine({"init_info": {"prefetch": ref}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {"ref": ref}})
        llm.finish_weight_update(ref["digest"])
    llm.reset_prefix_cache()
    assert engine.token_logprobs(PROBE) == versions.fresh.token_logprobs(PROBE)
    engine._sink.version = engine.version = None  # the engine was passed by


@pytest.mark.parametrize("kind", ["adapter", "MXFP8"])
def test_a_stock_vllm_refuses_what_is_not_its_model_s_weights(
    versions: Versions, engine: RolloutEngine, tmp_path: Path, kind: str
) -> None:
    before, version = sampled(engine), dict(reader.read(versions.refs[1]))
    if kind == "MXFP8":
        trainer = TensorTrainer(dict(quantize_tensors(version.items(), ["model.layers.0.self_attn.q_proj.weight"])))
    else:
        path = "base_model.model.model.layers.0.self_attn.q_proj"
        trainer = TensorTrainer({f"{path}.lora_A.weight": torch.ones(2, 64)}, {"peft_type": "LORA", "r": 2})
    stage = Run(store=f"file://{tmp_path}", name="r").stage("policy", 0, [])
    ref = json.loads(commit(trainer, stage, SyncConfig(), None).model_dump_json())
    with pytest.raises(BadInput, match=f"is (an|in) {kind}.*(weight transfer|by weight transfer)"):
        engine._llm.init_weight_transfer_engine({"init_info": {"prefetch": ref}})
    engine._llm.start_weight_update()
    with pytest.raises(BadInput, match=f"is (an|in) {kind}"):
        engine._llm.update_weights({"update_info": {"ref": ref}})
    assert sampled(engine).equals(before)
