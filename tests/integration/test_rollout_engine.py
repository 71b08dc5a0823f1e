"""The rollout engine on real vLLM: deterministic, and after an update in place the same as freshly loaded, bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from infra.errors import BadInput
from infra.policy.version import tensor_digest
from infra.storage import schemas
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tests.support.vllm_engines import FAMILIES, PROBE, PROMPTS, Maker, Pair, prompts, sampled

SETTINGS = RolloutConfig(samples_per_prompt=3, max_new_tokens=12, kv_cache_gib=0.05, dtype="float32")


class Model(Pair):
    """A model folder, another policy of its shape, and an engine for each."""

    def __init__(self, make: Maker, root: Path):
        super().__init__(make(root / "first", 0), make(root / "other", 1), SETTINGS)
        self.first_tensors = load_file(self.folder / "model.safetensors")
        self.other_tensors = load_file(self.other / "model.safetensors")


@pytest.fixture(scope="module", **FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    made = Model(request.param, tmp_path_factory.mktemp("model"))
    yield made
    made.close()


@pytest.fixture
def engine(model: Model) -> RolloutEngine:
    """The engine with its folder's own weights."""
    if model.engine.version != "first":
        model.engine.apply(model.first_tensors.items(), "first")
    return model.engine


def test_an_updated_engine_equals_a_fresh_one_bit_for_bit(model: Model, engine: RolloutEngine):
    before = sampled(engine)
    engine.apply(model.other_tensors.items(), "other")
    assert sampled(engine).equals(sampled(model.fresh))
    assert engine.token_logprobs(PROBE) == model.fresh.token_logprobs(PROBE)
    engine.apply(model.first_tensors.items(), "first")
    assert sampled(engine).equals(before), "the first policy, applied again, is the first policy"
    assert not before.equals(sampled(model.fresh)), "the two policies differ, or this test shows nothing"


def test_what_was_sampled_does_not_depend_on_calls_before(engine: RolloutEngine):
    first = sampled(engine)
    sampled(engine, prompts("What is 3 + 4? Reply with the number only, or else!"), seed=7)
    assert sampled(engine).equals(first)
    assert not sampled(engine, seed=2).equals(first)


def test_rows_keep_the_prompts_order_and_carry_the_version(engine: RolloutEngine):
    table, stats = engine.sample(PROMPTS, samples=2, seed=1)
    assert list(zip(table["prompt_id"].to_pylist(), table["sample"].to_pylist(), strict=True)) == [
        (f"p{prompt}", sample) for prompt in range(3) for sample in range(2)
    ]
    assert set(table["policy_version"].to_pylist()) == {"first"}
    assert stats["prompts"] == 3 and stats["dropped_prompts"] == 0
    assert stats["response_tokens"] == sum(len(ids) for ids in table["response_ids"].to_pylist())
    schemas.validate(table, schemas.ROLLOUT)


def test_sampled_logprobs_are_those_of_the_policy_at_temperature_1(engine: RolloutEngine):
    for row in sampled(engine).to_pylist():
        scored = engine.token_logprobs([row["prompt_ids"] + row["response_ids"]])[0]
        assert np.allclose(row["logprobs"], scored[-len(row["response_ids"]) :], atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 34, 63, 64, 65, 66])
def test_samples_share_a_prompt_of_any_length(engine: RolloutEngine, tokens: int):
    """All but the first sample copy the KV of the prompt's last block, of 32 tokens."""
    table, _ = engine.sample(prompts("x" * (tokens - 1)), samples=3, max_new_tokens=3)
    for row in table.to_pylist():
        assert len(row["prompt_ids"]) == tokens
        scored = engine.token_logprobs([row["prompt_ids"] + row["response_ids"]])[0]
        assert np.allclose(row["logprobs"], scored[-len(row["response_ids"]) :], atol=1e-4)


def test_prompts_of_more_tokens_than_vllm_computes_in_a_step_are_sampled_as_alone(engine: RolloutEngine):
    many = prompts(*(f"{number:03}" + "x" * 60 for number in range(80)))
    table, _ = engine.sample(many, samples=1, seed=3, max_new_tokens=2)
    assert sum(len(ids) for ids in table["prompt_ids"].to_pylist()) > 4096
    last, _ = engine.sample(many.slice(79), samples=1, seed=3, max_new_tokens=2)
    assert table.slice(79)["response_ids"].to_pylist() == last["response_ids"].to_pylist()


def test_logprobs_are_of_the_distribution_that_was_sampled(engine: RolloutEngine):
    table, _ = engine.sample(PROMPTS, samples=1, temperature=0.5, max_new_tokens=1)
    plain, _ = engine.sample(PROMPTS, samples=1, temperature=1.0, max_new_tokens=1)
    assert table["logprobs"].to_pylist() != plain["logprobs"].to_pylist()


def test_temperature_0_is_greedy(engine: RolloutEngine):
    table, _ = engine.sample(PROMPTS, samples=2, temperature=0)
    responses = table["response_ids"].to_pylist()
    assert responses[0::2] == responses[1::2]


def test_a_sampled_eos_ends_the_response_and_has_its_logprob(engine: RolloutEngine):
    table, _ = engine.sample(PROMPTS, samples=64, max_new_tokens=60)
    stopped = [row for row in table.to_pylist() if row["finish_reason"] == "stop"]
    assert stopped, "64 random responses a prompt without one EOS in 256 tokens"
    for row in stopped:
        assert row["response_ids"][-1] == 1 and 1 not in row["response_ids"][:-1]
        assert row["logprobs"][-1] < 0 and "</s>" not in row["response_text"]
    begun = [row for row in table.to_pylist() if 0 in row["response_ids"]]
    assert begun and all("<s>" in row["response_text"] for row in begun), "a special token is text that was sampled"


def test_routes_are_recorded_for_every_token_but_the_last(model: Model, engine: RolloutEngine):
    for row in sampled(engine).to_pylist():
        unpacked = schemas.unpack_routes(row)
        if model.engine._route_layers:
            assert unpacked is not None
            routes, mask = unpacked.experts, unpacked.mask
            tokens = len(row["prompt_ids"]) + len(row["response_ids"])
            assert unpacked.layers == (0, 1, 2) and routes.shape == (tokens, 3, 2)
            assert mask.tolist() == [True] * (tokens - 1) + [False]
            assert routes.max() < 8 and (routes[:-1, :, 0] != routes[:-1, :, 1]).all()
        else:
            assert unpacked is None


def test_an_update_that_breaks_off_leaves_the_old_policy(model: Model, engine: RolloutEngine):
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(model.other_tensors.items())[:-1]
        raise ConnectionError("the store went away")

    before = sampled(engine)
    with pytest.raises(ConnectionError):
        engine.apply(source(), "other")
    assert engine.version == "first" and sampled(engine).equals(before)


def test_an_update_that_does_not_fit_leaves_the_old_policy(model: Model, engine: RolloutEngine):
    before = sampled(engine)
    with pytest.raises(BadInput, match="'model.norm.weight': missing"):
        tensors = {name: tensor for name, tensor in model.other_tensors.items() if name != "model.norm.weight"}
        engine.apply(tensors.items(), "other")
    assert engine.version == "first" and sampled(engine).equals(before)


def test_the_engine_tells_bit_for_bit_what_it_holds(model: Model, engine: RolloutEngine):
    half = {name: tensor.bfloat16() for name, tensor in model.other_tensors.items()}
    engine.apply(half.items(), "half")
    held = engine.digests(dict.fromkeys(half, torch.bfloat16))
    assert held == {name: tensor_digest(tensor) for name, tensor in half.items()}


def test_a_prompt_too_long_for_the_context_is_dropped_and_counted(engine: RolloutEngine):
    table, stats = engine.sample(prompts("short", "long" * 50), samples=2, max_new_tokens=4)
    assert table["prompt_id"].to_pylist() == ["p0", "p0"] and stats["dropped_prompts"] == 1
    with pytest.raises(BadInput, match="none of 1 fits the context of 128"):
        engine.sample(prompts("long" * 50))


def test_an_empty_table_and_malformed_messages_are_refused(engine: RolloutEngine):
    with pytest.raises(BadInput, match="empty"):
        engine.sample(schemas.PROMPT.empty_table())
    broken = PROMPTS.slice(0, 1).set_column(2, schemas.PROMPT.field("messages"), pa.array(["{not json"]))
    with pytest.raises(BadInput, match="prompt 'p0'"):
        engine.sample(broken)


def test_a_token_that_the_model_has_not_is_named(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BadInput, match=r"sequence 1: token \(id 258\) is not one of the model's 258"):
        engine.token_logprobs([[1, 2], [5, 258]])
    monkeypatch.setattr(engine, "_vocabulary", 2)
    with pytest.raises(BadInput, match=r"prompt 'p0': token '.' \(id \d+\) is not one of the model's 2"):
        engine.sample(PROMPTS)


def test_token_logprobs_agree_with_transformers(model: Model, engine: RolloutEngine):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    for ids, logprobs in zip(PROBE, engine.token_logprobs(PROBE), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(ids[1:], dtype=torch.long).unsqueeze(-1)).squeeze(-1)
        assert np.allclose(logprobs, expected.numpy(), atol=1e-4)
