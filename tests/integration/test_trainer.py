"""The trainer on real Megatron models (tiny, random): its numbers against transformers', and what a run leans on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load, save

from infra.errors import BadInput, NonFiniteUpdate
from tasks.update.config import UpdateConfig
from tests.support.models import write_tiny_llama

VOCABULARY = 256
Make = Callable[..., Any]


def write_tiny_qwen3_moe(folder: Path) -> Path:
    """A random Qwen3-MoE: 2 layers, 8 experts, 2 a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(params=["llama", "moe"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def make_trainer(folder: Path, **settings: Any) -> Any:
    from tasks.update.trainer import Trainer

    return Trainer(str(folder), UpdateConfig.model_validate({"precision": "float32", "lr": 1e-3} | settings), seed=1)


def scored(seed: int = 0, prompts: int = 3, samples: int = 4, **columns: Any) -> pa.Table:
    """Random responses of differing lengths to random prompts, with logprobs near a random model's."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(prompts):
        prompt = rng.integers(0, VOCABULARY, rng.integers(2, 12)).tolist()
        for _ in range(samples):
            length = int(rng.integers(1, 9))
            rows.append(
                {
                    "prompt_ids": prompt,
                    "response_ids": rng.integers(0, VOCABULARY, length).tolist(),
                    "logprobs": (rng.normal(size=length) * 0.3 - math.log(VOCABULARY)).tolist(),
                    "loss_mask": [True, *(rng.random(length - 1) > 0.2).tolist()],
                    "advantage": float(rng.normal()),
                }
                | columns
            )
    return pa.Table.from_pylist(rows)


def changed(table: pa.Table, change: Callable[[int, dict], None]) -> pa.Table:
    rows = table.to_pylist()
    for index, row in enumerate(rows):
        change(index, row)
    return pa.Table.from_pylist(rows)


def gradients(trainer: Any, batch: pa.Table) -> dict[str, torch.Tensor]:
    """The step's gradient under Hugging Face's names, as the optimizer would get it."""
    captured: dict[str, torch.Tensor] = {}

    def capture(lr: float, grad_norm: float) -> None:
        parameters = trainer.model.parameters()
        weights = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            gradient = trainer.optimizer.masters[name].grad
            parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
        captured.update({name: tensor.clone() for name, tensor in trainer.export()})
        for name, parameter in parameters.items():
            parameter.data = weights[name]

    step, trainer.optimizer.step = trainer.optimizer.step, capture
    try:
        trainer.update(batch)
    finally:
        trainer.optimizer.step = step
    return captured


def exported(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def plain_gradients(folder: Path, batch: pa.Table, config: UpdateConfig) -> dict[str, torch.Tensor]:
    """The gradient as a textbook would: transformers, each sample alone with its prompt, every logit computed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = batch.to_pylist()
    total = sum(sum(row["loss_mask"]) for row in rows)
    losses = []
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / config.temperature
        logprobs = logits.log_softmax(-1)[range(len(response)), response]
        ratio = (logprobs - torch.tensor(row["logprobs"])).exp()
        clipped = ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
        surrogate = -torch.minimum(ratio * row["advantage"], clipped * row["advantage"])
        losses.append((surrogate * torch.tensor(row["loss_mask"])).sum() / total)
    torch.stack(losses).sum().backward()
    return checkpoint_names({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def checkpoint_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers keeps experts stacked in memory; checkpoints have them one by one."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            named[name] = tensor
            continue
        parent, projection = name.rsplit(".", 1)
        for expert, weight in enumerate(tensor):
            parts = {"gate_proj": weight.chunk(2)[0], "up_proj": weight.chunk(2)[1]}
            for part, value in (parts if projection == "gate_up_proj" else {"down_proj": weight}).items():
                named[f"{parent}.{expert}.{part}.weight"] = value
    return named


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_equals_transformers_with_every_sample_alone(folder: Path, temperature: float):
    """Shared prompts, packing, gathered logits and the fused loss change nothing but rounding."""
    batch = scored()
    trainer = make_trainer(folder, temperature=temperature, microbatch_tokens=40)
    found = gradients(trainer, batch)
    expected = plain_gradients(folder, batch, trainer.config)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    "settings",
    [
        {"microbatch_tokens": 1},
        {"microbatch_tokens": 17},
        {"share_prompts": False},
        {"logits_chunk_tokens": 3},
        {"skip_zero_advantage": False},
    ],
)
def test_gradient_does_not_depend_on_how_it_is_computed(llama: Path, settings: dict[str, Any]):
    def some_zero(index: int, row: dict) -> None:
        row["advantage"] *= index % 4 != 0

    batch = changed(scored(), some_zero)
    expected = gradients(make_trainer(llama), batch)
    for name, gradient in gradients(make_trainer(llama, **settings), batch).items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_logprobs_equal_transformers(folder: Path):
    from transformers import AutoModelForCausalLM

    sequences = [list(range(3, 3 + n)) for n in (2, 9, 1, 30)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for tokens, logprobs in zip(
        sequences, make_trainer(folder, temperature=0.5).token_logprobs(sequences), strict=True
    ):
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_export_gives_back_the_checkpoint_bit_for_bit(folder: Path):
    from safetensors.torch import load_file

    assert_same(exported(make_trainer(folder)), load_file(folder / "model.safetensors"))


def test_good_answers_become_likelier_and_bad_ones_less(folder: Path):
    good, bad = [5, 6, 7, 8], [5, 9, 9, 9]
    trainer = make_trainer(folder)
    before = [sum(logprobs[1:]) for logprobs in trainer.token_logprobs([good, bad])]
    for _ in range(3):
        engine = trainer.token_logprobs([good, bad])
        trainer.update(
            pa.Table.from_pylist(
                [
                    {
                        "prompt_ids": tokens[:2],
                        "response_ids": tokens[2:],
                        "logprobs": logprobs[1:],
                        "loss_mask": [True] * 2,
                        "advantage": advantage,
                    }
                    for tokens, logprobs, advantage in zip((good, bad), engine, (1.0, -1.0), strict=True)
                ]
            )
        )
    after = [sum(logprobs[1:]) for logprobs in trainer.token_logprobs([good, bad])]
    assert after[0] > before[0] and after[1] < before[1]


def test_supervised_steps_make_solutions_likely_and_leave_no_momentum(folder: Path):
    trainer = make_trainer(folder)
    pairs = [([5, 6], [7, 8, 9]), ([5, 7], [1, 2])]
    plain = trainer.token_logprobs([prompt + response for prompt, response in pairs])
    expected = -sum(sum(p[1:]) for p in plain) / 5
    losses = trainer.supervise([pairs] * 20, lr=5e-3)
    assert losses[0] == pytest.approx(expected, rel=1e-4) and losses[-1] < losses[0] / 4
    assert trainer.step == 0 and not any(s["exp_avg"].any() for s in trainer.optimizer.adam.state.values())


def test_metrics_of_a_step_on_policy(llama: Path):
    trainer = make_trainer(llama)
    batch = scored(prompts=2, samples=2)

    def on_policy(index: int, row: dict) -> None:
        logprobs = trainer.token_logprobs([row["prompt_ids"] + row["response_ids"]])[0]
        row["logprobs"] = logprobs[len(row["prompt_ids"]) - 1 :]
        row["advantage"] = (1.0, 0.0, -1.0, 2.0)[index]

    batch = changed(batch, on_policy)
    rows = batch.to_pylist()
    metrics = trainer.update(batch)
    assert metrics["k3_mean"] < 1e-9 and metrics["logprob_diff_max"] < 1e-4
    assert metrics["ratio_mean"] == pytest.approx(1.0) and metrics["clip_fraction"] == 0
    assert metrics["loss_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert (metrics["trained_samples"], metrics["skipped_samples"], metrics["updated"]) == (3, 1, 1)
    assert 0 < metrics["entropy"] <= math.log(trainer.model.vocabulary) + 1e-3
    assert metrics["loss"] == pytest.approx(
        -sum(sum(row["loss_mask"]) * row["advantage"] for row in rows) / metrics["loss_tokens"], rel=1e-3
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_continuing_from_a_checkpoint_is_bit_identical_to_never_having_stopped(folder: Path, precision: str):
    settings = {"precision": precision, "lr_warmup_steps": 3, "weight_decay": 0.1, "kl_coef": 0.1}
    undisturbed = make_trainer(folder, **settings)
    undisturbed.update(scored(1))
    tensors, meta = undisturbed.state()
    saved = save({name: tensor.contiguous() for name, tensor in tensors.items()})  # as safetensors, on its way to disk
    expected = [undisturbed.update(scored(seed)) for seed in (2, 3)]

    resumed = make_trainer(folder, **settings)
    resumed.load_state(load(saved), meta)
    assert [resumed.update(scored(seed)) for seed in (2, 3)] == expected
    assert resumed.step == undisturbed.step == 3
    assert_same(exported(resumed), exported(undisturbed))
    assert_same(resumed.state()[0], undisturbed.state()[0])


def test_a_trainer_goes_back_to_an_earlier_state_of_its_own(llama: Path):
    trainer = make_trainer(llama)
    tensors, meta = trainer.state()
    start = {name: tensor.clone() for name, tensor in tensors.items()}
    first = trainer.update(scored())
    trainer.load_state(start, meta)
    assert trainer.update(scored()) == first


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_failed_update_leaves_everything_as_it_was(llama: Path, precision: str):
    def explode(index: int, row: dict) -> None:
        row["logprobs"], row["advantage"] = [-1e30] * len(row["logprobs"]), -1.0  # an infinite importance ratio

    def from_another_policy(index: int, row: dict) -> None:
        row["logprobs"] = [logprob - 10 for logprob in row["logprobs"]]

    trainer, undisturbed = (make_trainer(llama, precision=precision, correction={"max_k3": 1000.0}) for _ in range(2))
    trainer.update(scored(1))
    undisturbed.update(scored(1))
    with pytest.raises(BadInput, match=r"max_k3 is 1000; engine and trainer do not hold one policy"):
        trainer.update(changed(scored(2), from_another_policy))
    with pytest.raises(NonFiniteUpdate, match="step 2"):
        trainer.update(changed(scored(2), explode))
    with pytest.raises(BadInput, match="row 0"):
        trainer.update(changed(scored(2), lambda index, row: row.update(advantage=math.nan)))
    assert trainer.step == 1
    assert trainer.update(scored(3)) == undisturbed.update(scored(3))
    assert_same(exported(trainer), exported(undisturbed))


def test_of_several_optimizer_steps_none_is_applied_when_the_batch_is_of_another_policy(llama: Path):
    several = {"minibatches": 2, "old_logprobs": "trainer", "loss": "gspo", "loss_args": {"low": 0.2, "high": 0.2}}
    trainer = make_trainer(llama, **several, correction={"max_k3": 1e-12})
    before = exported(trainer)
    with pytest.raises(BadInput, match=r"max_k3 is 1e-12; engine and trainer do not hold one policy"):
        trainer.update(scored())
    assert trainer.step == 0
    assert_same(exported(trainer), before)


def test_nan_at_masked_positions_changes_nothing(llama: Path):
    def poison(index: int, row: dict) -> None:
        row["logprobs"] = [
            p if counts else math.nan for p, counts in zip(row["logprobs"], row["loss_mask"], strict=True)
        ]

    clean, poisoned = make_trainer(llama), make_trainer(llama)
    assert clean.update(scored()) == poisoned.update(changed(scored(), poison))
    assert_same(exported(clean), exported(poisoned))


@pytest.mark.parametrize("nothing", [{"advantage": 0.0}, {"loss_mask": []}])
def test_a_batch_with_nothing_to_train_on_advances_the_step_only(llama: Path, nothing: dict):
    def empty(index: int, row: dict) -> None:
        row.update({"loss_mask": [False] * len(row["response_ids"])} if "loss_mask" in nothing else nothing)

    trainer = make_trainer(llama)
    trainer.update(scored())  # so that Adam's moments are none of the beginning's zeros
    before, adam = exported(trainer), {name: value.clone() for name, value in trainer.optimizer.state().items()}
    metrics = trainer.update(changed(scored(), empty))
    assert (metrics["updated"], metrics["trained_samples"], metrics["skipped_samples"], trainer.step) == (0, 0, 12, 2)
    assert all(map(math.isfinite, metrics.values()))
    assert_same(exported(trainer), before)
    assert_same(trainer.optimizer.state(), adam)


def test_a_batch_of_no_rows_advances_the_step_only(llama: Path):
    trainer = make_trainer(llama)
    before = exported(trainer)
    metrics = trainer.update(scored().slice(0, 0))
    assert (metrics["updated"], metrics["skipped_samples"], metrics["loss_tokens"], trainer.step) == (0, 0, 0, 1)
    assert all(map(math.isfinite, metrics.values()))
    assert_same(exported(trainer), before)


def test_kl_is_to_the_initial_weights(llama: Path):
    trainer = make_trainer(llama, kl_coef=0.5)
    kl = [trainer.update(scored(seed, advantage=0.0 if seed == 0 else 1.0))["kl"] for seed in range(3)]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert kl[2] > 1e-6


def test_bf16_keeps_fp32_masters_and_an_fp32_path_to_the_same_loss(folder: Path):
    full, half = make_trainer(folder), make_trainer(folder, precision="bfloat16")
    assert {t.dtype for t in exported(half).values()} == {torch.bfloat16}
    assert {t.dtype for t in half.optimizer.masters.values()} == {torch.float32}
    assert half.update(scored())["loss"] == pytest.approx(full.update(scored())["loss"], rel=0.05, abs=0.02)


def test_bf16_weights_are_computed_with_as_they_are_served(llama: Path):
    trainer = make_trainer(llama, weights="bfloat16", lr=1e-6)
    for seed in range(2):
        trainer.update(scored(seed))
    assert {tensor.dtype for tensor in exported(trainer).values()} == {torch.bfloat16}
    for name, parameter in trainer.model.parameters().items():
        assert torch.equal(parameter, parameter.bfloat16().float()), name
        master = trainer.optimizer.masters[name]
        assert torch.equal(parameter, master.bfloat16().float()) and not torch.equal(parameter, master), name


def test_weights_are_what_the_folder_has(tmp_path: Path, llama: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    model.model.layers[0].mlp.down_proj.float()
    model.save_pretrained(tmp_path)
    trainer = make_trainer(tmp_path)
    trainer.update(scored())
    wide = {name for name, tensor in exported(trainer).items() if tensor.dtype == torch.float32}
    assert wide == {"model.layers.0.mlp.down_proj.weight"}


def test_gradients_stay_with_autograd_where_megatron_would_fuse_their_sums(llama: Path):
    """With Transformer Engine the bridge turns the fusion on; it adds into buffers that only Megatron's DDP makes."""
    from megatron.bridge import AutoBridge

    from tasks.update.model import _configure

    provider = AutoBridge.from_hf_pretrained(str(llama)).to_megatron_provider(load_weights=False)
    provider.gradient_accumulation_fusion = True
    with mock.patch("torch.cuda.is_available", return_value=True), mock.patch.object(type(provider), "finalize"):
        _configure(provider, torch.bfloat16, UpdateConfig(), {})
    assert not provider.gradient_accumulation_fusion


def test_a_token_outside_the_vocabulary_is_refused_by_row(llama: Path):
    def foreign(index: int, row: dict) -> None:
        if index == 2:
            row["response_ids"] = [10**6] * len(row["response_ids"])

    with pytest.raises(BadInput, match="row 2"):
        make_trainer(llama).update(changed(scored(), foreign))


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="no config.json"):
        make_trainer(tmp_path)


def test_parallel_sizes_beyond_the_processes_are_refused(llama: Path):
    with pytest.raises(BadInput, match="pipeline 1 x tensor 2 x data 1 are 2 processes, the trainer has 1"):
        make_trainer(llama, parallel={"tensor": 2})


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_an_offloaded_optimizer_trains_the_same_policy_bit_for_bit(folder: Path, weights: str):
    """Steps, versions and checkpoints; and a checkpoint of either goes on in the other."""
    plain, offloaded = (
        make_trainer(folder, weights=weights, offload_optimizer=offload, weight_decay=0.1) for offload in (False, True)
    )
    for seed in range(2):
        assert plain.update(scored(seed)) == offloaded.update(scored(seed))
    assert_same(exported(plain), exported(offloaded))
    (state, meta), (other, _) = plain.state(), offloaded.state()
    assert_same(state, other)
    parameters = {id(parameter) for parameter in offloaded.model.parameters().values()}
    assert not parameters & {id(master) for master in offloaded.optimizer.masters.values()}

    stored = load(save({name: tensor.contiguous() for name, tensor in state.items()}))
    resumed = make_trainer(folder, weights=weights, offload_optimizer=True, weight_decay=0.1)
    resumed.load_state(stored, meta)
    assert_same(exported(resumed), exported(plain))
    assert plain.update(scored(2)) == resumed.update(scored(2))
    assert_same(exported(plain), exported(resumed))
