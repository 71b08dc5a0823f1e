"""The fused output layer equals the plain one: logits, log-softmax, loss, autograd."""

import pytest
import torch

from tasks.update.linear_loss import OutputLayer, linear_logprobs, linear_loss
from tasks.update.losses.grpo import Grpo
from tasks.update.step_loss import LossConfig, LossInputs, step_loss

N, H, V = 23, 8, 50


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float32)  # noqa: E731
    hidden, weight = draw(N, H).requires_grad_(), draw(V, H).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    return hidden, weight, targets, draw(N) - 4, draw(N)


def plain(hidden, weight, targets, temperature, cap=None):
    logits_NV = hidden @ weight.t()
    if cap is not None:
        logits_NV = cap * torch.tanh(logits_NV / cap)
    logprobs_NV = (logits_NV / temperature).log_softmax(-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, targets.unsqueeze(1)).squeeze(1), entropy_N


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (0.6, None), (0.6, 2.0)])
def test_loss_and_gradients_equal_the_plain_computation(problem, chunk_tokens, temperature, cap):
    hidden, weight, targets, rollout, advantages = problem
    config = LossConfig(Grpo(clip_eps_low=0.2, clip_eps_high=0.2), denominator=N)
    logprobs, entropy = plain(hidden, weight, targets, temperature, cap)
    expected = step_loss(LossInputs(logprobs, rollout, advantages, entropy), config)
    expected_gradients = torch.autograd.grad(expected.loss, [hidden, weight])

    layer = OutputLayer(weight, temperature, chunk_tokens, cap=cap)
    loss, sums = linear_loss(
        hidden,
        targets,
        layer,
        lambda at, logprobs_C, entropy_C: step_loss(
            LossInputs(logprobs_C, rollout[at], advantages[at], entropy_C), config
        ),
    )
    gradients = torch.autograd.grad(loss * 3, [hidden, weight])

    torch.testing.assert_close(loss, expected.loss)
    assert sums.entropy == pytest.approx(expected.entropy, rel=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient * 3)


def test_logprobs_equal_log_softmax(problem):
    hidden, weight, targets, *_ = problem
    logprobs = linear_logprobs(hidden, targets, OutputLayer(weight, chunk_tokens=5))
    torch.testing.assert_close(logprobs, plain(hidden, weight, targets, 1.0)[0].detach())


def test_large_logits_do_not_overflow():
    logprobs = linear_logprobs(torch.tensor([[1000.0]]), torch.tensor([1]), OutputLayer(torch.tensor([[1.0], [-1.0]])))
    assert logprobs.item() == -2000


@pytest.mark.parametrize("chunk_tokens", [7, 100])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (0.6, 2.0)])
def test_the_entropy_bonus_has_its_gradient(problem, chunk_tokens, temperature, cap):
    hidden, weight, targets, rollout, advantages = problem
    config = LossConfig(Grpo(), entropy_coef=0.3, denominator=N)
    logprobs, entropy = plain(hidden, weight, targets, temperature, cap)
    expected = torch.autograd.grad(
        step_loss(LossInputs(logprobs, rollout, advantages, entropy), config).loss, [hidden, weight]
    )
    loss, _ = linear_loss(
        hidden,
        targets,
        OutputLayer(weight, temperature, chunk_tokens, cap=cap),
        lambda at, logprobs_C, entropy_C: step_loss(
            LossInputs(logprobs_C, rollout[at], advantages[at], entropy_C), config
        ),
    )
    for gradient, other in zip(torch.autograd.grad(loss, [hidden, weight]), expected, strict=True):
        torch.testing.assert_close(gradient, other)
