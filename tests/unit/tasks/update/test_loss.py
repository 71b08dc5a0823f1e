"""The GRPO loss against values worked out by hand, and the properties that microbatches rest on."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tasks.update.kl import kl_estimate
from tasks.update.losses.grpo import Grpo
from tasks.update.step_loss import LossConfig, LossInputs, LossSums, step_loss

PLAIN = LossConfig(Grpo(clip_eps_low=0.2, clip_eps_high=0.3))


def tokens(ratios: list[float], advantages: list[float], reference: list[float] | None = None) -> LossInputs:
    """Tokens whose rollout logprob is 0, so that their logprob is the log of the ratio."""
    return LossInputs(
        logprobs=torch.tensor(ratios).log().requires_grad_(),
        rollout_logprobs=torch.zeros(len(ratios)),
        advantages=torch.tensor(advantages),
        entropy=torch.ones(len(ratios)),
        reference_logprobs=None if reference is None else torch.tensor(reference),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),  # on policy: minus the advantage
        (1.1, 2.0, -2.2, 0),  # inside the trust region
        (1.5, 2.0, -2.6, 1),  # too likely already: 1.3 * 2, no gradient
        (0.5, 2.0, -1.0, 0),  # a good token that became unlikely is pulled back
        (0.5, -2.0, 1.6, 1),  # too unlikely already: 0.8 * 2
        (1.5, -2.0, 3.0, 0),  # a bad token that became likely is pushed back, unclipped
    ],
)
def test_surrogate_is_clipped_only_where_the_step_would_go_further(ratio, advantage, loss, clipped):
    inputs = tokens([ratio], [advantage])
    result = step_loss(inputs, PLAIN)
    assert result.policy_loss == pytest.approx(loss)
    assert result.clipped == clipped
    (gradient,) = torch.autograd.grad(result.loss, inputs.logprobs)
    assert gradient.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_all_tokens_of_the_step_weigh_the_same():
    result = step_loss(
        tokens([1.0, 1.0], [1.0, 3.0]), LossConfig(Grpo(clip_eps_low=0.2, clip_eps_high=0.2), denominator=8)
    )
    assert result.loss.item() == pytest.approx(-(1.0 + 3.0) / 8)


def test_mismatch_metrics_compare_trainer_and_rollout():
    result = step_loss(tokens([1.0, 2.0], [0.0, 0.0]), PLAIN)
    assert result.k3 == pytest.approx(0 + (2 - 1 - math.log(2)))
    assert result.logprob_diff_max == pytest.approx(math.log(2))
    assert (result.ratio, result.ratio_max, result.tokens) == (pytest.approx(3.0), pytest.approx(2.0), 2)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)])
def test_kl_estimators(estimator, value):
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator).item() == pytest.approx(value)
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0]), estimator).item() == 0


def test_kl_penalty_adds_to_the_loss():
    config = LossConfig(Grpo(clip_eps_low=0.2, clip_eps_high=0.2), kl_coef=0.1, kl_estimator="k2", denominator=2)
    result = step_loss(tokens([1.0, 1.0], [0.0, 0.0], reference=[1.0, 2.0]), config)
    assert result.kl == pytest.approx(0.5 + 2.0)
    assert result.loss.item() == pytest.approx(0.1 * 2.5 / 2)


@given(st.lists(st.floats(-5, 0, width=32), min_size=1, max_size=20))
def test_kl_k3_is_never_negative(logprobs):
    assert (kl_estimate(torch.tensor(logprobs), torch.full((len(logprobs),), -2.0), "k3") >= -1e-6).all()


token = st.tuples(st.floats(0.25, 4, width=32), st.floats(-3, 3, width=32), st.floats(-2, 2, width=32))


@given(st.lists(token, min_size=2, max_size=30), st.integers(1, 29), st.sampled_from(["k1", "k2", "k3"]))
def test_a_step_is_the_sum_of_its_parts_however_it_is_split(rows, cut, estimator):
    config = LossConfig(
        Grpo(clip_eps_low=0.2, clip_eps_high=0.28), kl_coef=0.3, kl_estimator=estimator, denominator=len(rows)
    )
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    whole = step_loss(tokens(*map(list, zip(*rows, strict=True))), config)
    total = LossSums(loss=torch.zeros(()))
    for part in parts:
        total = total + step_loss(tokens(*map(list, zip(*part, strict=True))), config)
    for name, value in vars(whole).items():
        value, sum_of_parts = (torch.as_tensor(v).detach().item() for v in (value, getattr(total, name)))
        assert sum_of_parts == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(("estimator", "value"), [("k1+", 0.5), ("k3+", math.exp(-0.5) - 1 + 0.5)])
def test_straight_through_kl_has_its_value_and_the_gradient_of_k2(estimator, value):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([-1.5]), estimator)
    assert estimate.item() == pytest.approx(value)
    assert torch.autograd.grad(estimate.sum(), logprobs)[0].item() == pytest.approx(0.5)


def test_the_gradient_of_k2_and_of_the_straight_through_forms_is_that_of_the_reverse_kl():
    """The expectation over the policy's own samples, worked out over a whole distribution."""
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=drawn, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=drawn, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    for estimator in ("k2", "k1+", "k3+"):
        expected = (logprobs.detach().exp() * kl_estimate(logprobs, reference, estimator)).sum()
        (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
        torch.testing.assert_close(gradient, exact)


def test_the_entropy_bonus_is_taken_off_and_the_scale_is_a_tokens_weight():
    inputs = tokens([1.0, 1.0], [1.0, 3.0])
    config = LossConfig(Grpo(), entropy_coef=0.5, denominator=4)
    assert step_loss(inputs, config).loss.item() == pytest.approx(-(1 + 3) / 4 - 0.5 * 2 / 4)
    scaled = LossInputs(**{**vars(inputs), "scale": torch.tensor([0.5, 0.25])})
    assert step_loss(scaled, config).loss.item() == pytest.approx(-(0.5 + 0.75) - 0.5 * 0.75)


def test_after_the_first_optimizer_step_mismatch_is_still_that_of_rollout_and_trainer():
    inputs = LossInputs(
        logprobs=torch.tensor([0.3]).requires_grad_(),
        rollout_logprobs=torch.zeros(1),
        advantages=torch.ones(1),
        entropy=torch.ones(1),
        before_logprobs=torch.tensor([0.1]),
    )
    by_rollout = step_loss(inputs, LossConfig(Grpo(clip_eps_high=9.0)))
    by_trainer = step_loss(inputs, LossConfig(Grpo(clip_eps_high=9.0), old="trainer"))
    assert by_rollout.policy_loss == pytest.approx(-math.exp(0.3))
    assert by_trainer.policy_loss == pytest.approx(-math.exp(0.2))
    assert by_rollout.k3 == by_trainer.k3 == pytest.approx(math.exp(0.1) - 1 - 0.1)
