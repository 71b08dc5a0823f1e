"""Corrections for rollouts that differ from the trainer: weights by hand, and what reaches the gradient."""

import math

import pytest
import torch

from tasks.update.config import CorrectionConfig
from tasks.update.corrections import kept_sequences, token_weights
from tasks.update.losses.grpo import Grpo
from tasks.update.step_loss import LossConfig, LossInputs, step_loss

K = [0.1, 0.5, 1.0, 2.0, 5.0]


def weights(**settings) -> list[float]:
    return token_weights(torch.tensor(K).log(), CorrectionConfig(**settings)).weight_N.tolist()


def test_weights_by_hand():
    assert weights() == [1, 1, 1, 1, 1]
    assert weights(tokens="truncate", high=2) == pytest.approx([0.1, 0.5, 1, 2, 2])
    assert weights(tokens="mask", low=0.4, high=3) == pytest.approx([0, 0.5, 1, 2, 0])


def loss(kept: list[float] | None = None, **settings):
    logprobs = torch.tensor(K).log().requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        rollout_logprobs=torch.zeros(len(K)),
        advantages=torch.ones(len(K)),
        entropy=torch.zeros(len(K)),
        kept=None if kept is None else torch.tensor(kept),
    )
    sums = step_loss(
        inputs, LossConfig(Grpo(clip_eps_low=0.2, clip_eps_high=0.2), correction=CorrectionConfig(**settings))
    )
    return sums, torch.autograd.grad(sums.loss, logprobs)[0].tolist()


def test_a_corrected_token_s_gradient_is_its_weight_times_its_advantage_unclipped():
    sums, gradient = loss(tokens="truncate", high=2)
    assert gradient == pytest.approx([-0.1, -0.5, -1, -2, -2])
    assert (sums.truncated, sums.masked, sums.clipped) == (1, 0, 0)
    sums, gradient = loss(tokens="mask", low=0.4, high=3)
    assert gradient == pytest.approx([0, -0.5, -1, -2, 0])
    assert (sums.truncated, sums.masked) == (0, 2) and sums.weight == pytest.approx(3.5)


def test_without_a_correction_the_loss_is_ppo_to_the_rollout():
    sums, gradient = loss()
    assert gradient == pytest.approx([-0.1, -0.5, -1, 0, 0])
    assert (sums.clipped, sums.weight) == (2, len(K))


def test_a_dropped_response_has_no_gradient_and_the_mismatch_is_measured_all_the_same():
    whole, _ = loss(tokens="mask", low=0.4, high=3)
    sums, gradient = loss([1, 1, 0, 0, 1], tokens="mask", low=0.4, high=3)
    assert gradient == pytest.approx([0, -0.5, 0, 0, 0])
    assert sums.masked == 4 and sums.k3 == whole.k3 and sums.ratio == whole.ratio


def test_sequences_are_judged_by_their_geometric_mean_and_by_their_worst_token():
    config = CorrectionConfig(sequences="mask", sequence_low=0.9, sequence_high=1.1, sequence_veto=1e-3)
    even = torch.tensor([math.log(2), -math.log(2)])
    high = torch.tensor([0.0, 0.3])
    vetoed = torch.cat([torch.tensor([math.log(5e-4)]), torch.full((100,), -math.log(5e-4) / 100)])
    assert kept_sequences([even, high, vetoed, torch.tensor([])], config) == [True, False, False, True]
