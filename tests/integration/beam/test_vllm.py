"""Beam in vLLM: the golden logits and routes, the cache, bad checkpoints, the fp32 router, live updates, two ranks.

Engines live in this process (vLLM's import is most of what a process of its own would cost) with one OpenMP thread: two
threads on shared cores wait for each other longer than a small model computes.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.errors import BadInput
from infra.models.beam import vllm_plugin
from tests.support.family import DATA

GOLDEN = DATA / "beam-golden"
VOCAB, SPARSE_LAYERS, WINDOW = 256, [1, 2, 3], 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden config and weights alone: without an index vLLM loads every safetensors file of a folder."""
    return write_checkpoint(tmp_path_factory.mktemp("beam"), load_file(GOLDEN / "model.safetensors"))


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Any]:
    with started(checkpoint) as llm:
        yield llm


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    shutil.copyfile(GOLDEN / "config.json", folder / "config.json")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class started:
    """A vLLM engine on `folder` that is shut down at the end of the `with`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        from vllm import LLM

        vllm_plugin.register()
        settings = {"dtype": "float32", "enable_return_routed_experts": True} | settings
        self.llm = LLM(
            str(folder),
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_logprobs=VOCAB,
            max_model_len=256,
            max_num_batched_tokens=256,
            **settings,
        )

    def __enter__(self) -> Any:
        return self.llm

    def __exit__(self, *_: object) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def model_of(llm: Any) -> Any:
    return worker_of(llm).model_runner.model


def generate(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **sampling)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def logprobs_and_routes(llm: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log-softmax [batch, T - 1, vocab] of all positions but the last, routes [batch, T, layers, topk]."""
    outputs = generate(llm, ids.tolist(), max_tokens=1, prompt_logprobs=VOCAB)
    logprobs = torch.tensor([[[at[v].logprob for v in range(VOCAB)] for at in o.prompt_logprobs[1:]] for o in outputs])
    routes = [o.outputs[0].routed_experts for o in outputs]
    return logprobs, None if routes[0] is None else torch.tensor([r.tolist() for r in routes])


def as_sets(routes: torch.Tensor) -> torch.Tensor:
    return routes.sort(-1).values.int()


def test_logits_and_routes_are_the_golden_ones(engine: Any, golden: dict[str, torch.Tensor]) -> None:
    logprobs, routes = logprobs_and_routes(engine, golden["input_ids"])
    torch.testing.assert_close(logprobs, golden["logits"].log_softmax(-1)[:, :-1], atol=1e-4, rtol=0)
    assert torch.equal(as_sets(routes[:, :, SPARSE_LAYERS]), as_sets(golden["routes"]))


def test_routes_are_indexed_by_layer_and_dense_layers_stay_zero(engine: Any, golden: dict[str, torch.Tensor]) -> None:
    (output,) = generate(engine, golden["input_ids"][:1].tolist(), max_tokens=4)
    routes = output.outputs[0].routed_experts
    assert routes.shape == (48 + 4 - 1, 4, 4), "prompt + response - 1 (the last token has no route), all layers, topk"
    assert routes.dtype == "uint8"
    assert not routes[:, 0].any()
    assert all(len(set(token)) == 4 for layer in SPARSE_LAYERS for token in routes[:, layer].tolist())


def test_decoding_agrees_with_one_full_forward_beyond_the_window(engine: Any, golden: dict[str, torch.Tensor]) -> None:
    prompt = golden["input_ids"][0, :24].tolist()
    (decoded,) = generate(engine, [prompt], max_tokens=3 * WINDOW, logprobs=0)
    response = list(decoded.outputs[0].token_ids)
    (full,) = generate(engine, [prompt + response], max_tokens=1, prompt_logprobs=0)
    one_by_one = [at[token].logprob for at, token in zip(decoded.outputs[0].logprobs, response, strict=True)]
    at_once = [at[token].logprob for at, token in zip(full.prompt_logprobs[len(prompt) :], response, strict=True)]
    torch.testing.assert_close(torch.tensor(one_by_one), torch.tensor(at_once), atol=1e-4, rtol=0)


def test_checkpoint_with_wrong_tensors_is_one_error_that_names_them(tmp_path: Path) -> None:
    weights = load_file(GOLDEN / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    weights["model.layers.2.self_attn.gate_bias"] = torch.zeros(5)
    with pytest.raises(BadInput) as refused, started(write_checkpoint(tmp_path, weights)):
        pass
    for named in ("experts.3.up_proj.weight", "layers.0.self_attn.q_proj.bias", "layers.2.self_attn.gate_bias"):
        assert named in str(refused.value)


def test_update_may_bring_a_part_but_nothing_unknown(engine: Any, checkpoint: Path) -> None:
    weights, name = load_file(checkpoint / "model.safetensors"), "model.layers.1.mlp.gate.weight"
    model_of(engine).load_weights([(name, weights[name])])
    with pytest.raises(BadInput, match="gate_prjo"):
        model_of(engine).load_weights([("model.layers.1.self_attn.gate_prjo.weight", weights[name])])


def test_router_stays_fp32_to_the_bit_in_a_bf16_engine(checkpoint: Path, golden: dict[str, torch.Tensor]) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    with started(checkpoint, dtype="bfloat16") as llm:
        for layer in SPARSE_LAYERS:
            router = model_of(llm).model.layers[layer].mlp.gate
            assert torch.equal(router.weight, weights[f"model.layers.{layer}.mlp.gate.weight"])
            bias = weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
            assert torch.equal(router.e_score_correction_bias, bias)
        assert model_of(llm).model.layers[1].self_attn.qkv_proj.weight.dtype == torch.bfloat16
        logprobs, _ = logprobs_and_routes(llm, golden["input_ids"])
    # Rounding weights and activations to bf16's 8 bits moves the median logprob of this random, sharp model by 0.08;
    # where a token then chooses another expert, its logprobs move by more.
    error = (logprobs - golden["logits"].log_softmax(-1)[:, :-1]).abs()
    assert error.median() < 0.12, error.median()


def test_updated_engine_equals_a_fresh_one_to_the_bit(
    checkpoint: Path, tmp_path: Path, golden: dict[str, torch.Tensor]
) -> None:
    from tasks.rollout.weights import loader as rollout_weights

    generator = torch.Generator().manual_seed(1)
    before = load_file(checkpoint / "model.safetensors")
    after = {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in before.items()}
    with started(write_checkpoint(tmp_path, after)) as fresh:
        expected = logprobs_and_routes(fresh, golden["input_ids"])
    with started(checkpoint) as updated:
        stale = logprobs_and_routes(updated, golden["input_ids"])
        rollout_weights.load(worker_of(updated), list(after.items()))
        found = logprobs_and_routes(updated, golden["input_ids"])
        held = dict(rollout_weights.export(worker_of(updated), list(after)))
    assert not torch.equal(stale[0], expected[0])
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert all(torch.equal(held[name], tensor) for name, tensor in after.items())


@pytest.mark.usefixtures("two_ranks_fit")
def test_two_tensor_parallel_ranks_agree_with_golden(checkpoint: Path, golden: dict[str, torch.Tensor]) -> None:
    with started(checkpoint, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        logprobs, routes = logprobs_and_routes(llm, golden["input_ids"])
    torch.testing.assert_close(logprobs, golden["logits"].log_softmax(-1)[:, :-1], atol=1e-4, rtol=0)
    assert torch.equal(as_sets(routes[:, :, SPARSE_LAYERS]), as_sets(golden["routes"]))


@pytest.mark.usefixtures("two_ranks_fit")
def test_two_pipeline_stages_agree_with_golden(checkpoint: Path, golden: dict[str, torch.Tensor]) -> None:
    # vLLM 0.30 refuses to return routed experts over pipeline stages.
    settings = {"pipeline_parallel_size": 2, "enable_return_routed_experts": False}
    with started(checkpoint, distributed_executor_backend="mp", **settings) as llm:
        logprobs, _ = logprobs_and_routes(llm, golden["input_ids"])
    torch.testing.assert_close(logprobs, golden["logits"].log_softmax(-1)[:, :-1], atol=1e-4, rtol=0)


def test_tensor_parallel_size_that_splits_a_head_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"heads.*divi|divide.*heads"), started(checkpoint, tensor_parallel_size=3):
        pass


def test_lora_finds_every_module_and_the_experts(engine: Any) -> None:
    from vllm.lora.utils import get_supported_lora_modules, process_packed_modules_mapping
    from vllm.model_executor.models.interfaces import supports_lora, supports_pp

    model = model_of(engine)
    assert supports_lora(model) and supports_pp(model)
    assert {"qkv_proj", "gate_proj", "o_proj", "gate_up_proj", "down_proj"} <= set(get_supported_lora_modules(model))
    assert "experts.15.down_proj" in process_packed_modules_mapping(model)["experts"]


@pytest.mark.parametrize(
    ("asked", "native", "cuda", "expected"),
    [
        ("auto", False, False, "infra."),
        ("auto", True, True, "vllm."),
        ("auto", True, False, "infra."),
        ("portable", True, True, "infra."),
        ("native", True, True, "vllm."),
    ],
)
def test_native_beam_is_used_where_it_is_unless_lora_asks_for_ours(
    asked: str, native: bool, cuda: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.models.pop(vllm_plugin.ARCHITECTURE, None)
    if native:
        ModelRegistry.register_model(vllm_plugin.ARCHITECTURE, "vllm.model_executor.models.beam:BeamForCausalLM")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: cuda)
    monkeypatch.setenv(vllm_plugin.IMPLEMENTATION_ENV, asked)
    for _ in range(2):
        vllm_plugin.register()
    assert ModelRegistry.models[vllm_plugin.ARCHITECTURE].module_name.startswith(expected)


def test_unknown_or_absent_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("fast", "native"):
        monkeypatch.setenv(vllm_plugin.IMPLEMENTATION_ENV, asked)
        with pytest.raises(BadInput, match=vllm_plugin.IMPLEMENTATION_ENV):
            vllm_plugin.register()


def test_beam_tiny_is_served_in_bf16(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from infra.models.beam.tiny import write_beam_tiny

    folder = write_beam_tiny(tmp_path / "tiny")
    again = write_beam_tiny(tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (folder / name).read_bytes() == (again / name).read_bytes(), "equal seeds write equal bytes"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 12 + 9? Reply with the number only."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text and len(tokenizer) == 512
    with started(folder, dtype="bfloat16") as llm:
        (output,) = generate(llm, [ids], max_tokens=8)
    assert len(output.outputs[0].token_ids) == 8
