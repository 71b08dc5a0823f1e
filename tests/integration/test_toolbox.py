"""Losses, reductions, minibatches and epochs on a real Megatron model: what a step is does not depend on how it is computed."""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.models import megatron_cpu
from infra.sources import known_ideas
from tasks.update import losses
from tests.integration.test_trainer import assert_same, exported, gradients, make_trainer, scored
from tests.support.models import write_tiny_llama
from tests.support.processes import run_module

SEVERAL = {
    "loss": "gspo",
    "loss_args": {"low": 0.2, "high": 0.2},
    "reduction": "sequence_mean",
    "minibatches": 3,
    "epochs": 2,
    "old_logprobs": "trainer",
    "entropy_coef": 0.01,
    "eps": 1e-3,
}
"""eps: a step is a smooth function of the gradient, so that tolerances mean something."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


def same_gradient(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("loss", known_ideas(losses))
def test_a_losss_gradient_does_not_depend_on_microbatches_and_chunks(llama: Path, loss: str):
    settings = {"loss": loss, "reduction": "sequence_mean"}
    whole = gradients(make_trainer(llama, **settings), scored())
    assert any(gradient.any() for gradient in whole.values())
    same_gradient(
        whole, gradients(make_trainer(llama, **settings, microbatch_tokens=17, logits_chunk_tokens=3), scored())
    )


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "fixed"])
def test_a_reductions_gradient_does_not_depend_on_microbatches_and_weighs_as_it_says(llama: Path, reduction: str):
    settings: dict[str, Any] = {"loss": "policy_gradient", "reduction": reduction, "kl_coef": 0.1, "entropy_coef": 0.1}
    settings |= {"reduction_length": 8} if reduction == "fixed" else {}
    whole = gradients(make_trainer(llama, **settings), scored())
    same_gradient(whole, gradients(make_trainer(llama, **settings, microbatch_tokens=17), scored()))
    if reduction == "sequence_sum":
        fixed = gradients(make_trainer(llama, **settings | {"reduction": "fixed", "reduction_length": 8}), scored())
        same_gradient(whole, {name: gradient * 8 for name, gradient in fixed.items()})


def test_minibatches_are_optimizer_steps_one_after_the_other(llama: Path):
    """With ratios to the rollout, a step of two minibatches is two steps of one, bit for bit."""
    from tasks.update.batch import read_samples
    from tasks.update.minibatches import optimizer_steps

    batch, settings = scored(), {"loss": "importance_sampling"}
    several = make_trainer(llama, **settings, minibatches=2)
    metrics = several.update(batch)
    assert metrics["optimizer_steps"] == 2
    single = make_trainer(llama, **settings)
    for part in optimizer_steps(read_samples(batch), 2, 1, seed=0):
        single.update(batch.take(pa.array([sample.row for sample in part])))
    assert_same(exported(several), exported(single))


@pytest.mark.parametrize("loss", ["grpo", "clip_cov"])
def test_a_replayed_step_of_many_optimizer_steps_has_the_same_bits(llama: Path, loss: str):
    settings = {
        "minibatches": 3,
        "epochs": 2,
        "old_logprobs": "trainer",
        "loss": loss,
        "correction": {"tokens": "truncate"},
    }
    one, other = (make_trainer(llama, **settings) for _ in range(2))
    tensors, meta = one.state()
    kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for step in range(2):
        assert one.update(scored(step)) == other.update(scored(step))
    assert_same(exported(one), exported(other))
    one.load_state(kept, meta)
    for step in range(2):
        one.update(scored(step))
    assert_same(exported(one), exported(other))


def test_mismatch_is_that_before_the_step_whatever_the_minibatches(llama: Path):
    plain = make_trainer(llama).update(scored())
    several = make_trainer(llama, minibatches=3, lr=1e-2).update(scored())
    for name in ("k3_mean", "logprob_diff_max"):
        assert several[name] == pytest.approx(plain[name], rel=1e-4)


def test_two_processes_train_as_one(tmp_path: Path):
    run_module(__name__, str(tmp_path))
    one, two = (load_file(tmp_path / f"{name}.weights") for name in ("1", "2"))
    for name, tensor in one.items():
        assert (two[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    expected, found = (torch.load(tmp_path / f"{name}.metrics") for name in ("1", "2"))
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def _train(processes: int, out: Path) -> None:
    from tasks.update import group
    from tasks.update.config import UpdateConfig

    group.START_METHOD = "fork"
    torch.set_num_threads(1)
    settings = {"precision": "float32", "lr": 1e-3, "microbatch_tokens": 30, "parallel": {"data": processes}}
    trainer = group.make_trainer(str(out / "model"), UpdateConfig.model_validate(settings | SEVERAL), seed=1)
    metrics = trainer.update(scored(1))
    weights = {name: tensor.contiguous() for name, tensor in exported(trainer).items()}
    trainer.close()
    save_file(weights, out / f"{processes}.weights")
    torch.save(metrics, out / f"{processes}.metrics")


def main() -> None:
    out = Path(sys.argv[1])
    write_tiny_llama(out / "model")
    megatron_cpu.install()
    import megatron.bridge  # noqa: F401  (once, before the forks)

    for processes in (1, 2):
        process = multiprocessing.get_context("fork").Process(target=_train, args=(processes, out))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{processes} processes failed")


if __name__ == "__main__":
    main()
