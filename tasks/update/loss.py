"""The GRPO loss of a set of tokens: a pure function from logprobs to a loss and its metrics.

Every sum is over tokens and every weight is 1 / (loss tokens of the whole step), so results of disjoint sets of tokens
add up: the gradient does not depend on how a step is split into microbatches or chunks.
"""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from tasks.update.config import CorrectionConfig
from tasks.update.corrections import token_weights

_NO_CORRECTION = CorrectionConfig()
KlEstimator = Literal["k1", "k2", "k3"]
LARGEST = ("ratio_max", "logprob_diff_max")
"""Of LossSums: the fields of which the largest counts, not the sum."""


@dataclass(frozen=True)
class LossInputs:
    """N tokens that count in the loss. All tensors are float32 [N]; logprobs in nats, at the sampling temperature."""

    logprobs: Tensor
    """Of the policy being trained; carries the gradient."""
    rollout_logprobs: Tensor
    """Of the policy that sampled, as its engine reported them."""
    advantages: Tensor
    """Each token's advantage."""
    entropy: Tensor
    """Of the policy's next-token distribution (a metric only)."""
    reference_logprobs: Tensor | None = None
    """Of the reference policy; needed if kl_coef > 0."""
    kept: Tensor | None = None
    """1 for tokens of responses that count, 0 for those that a sequence mask dropped; None: all count."""


@dataclass(frozen=True)
class LossConfig:
    """What the loss depends on besides the tokens."""

    clip_eps_low: float
    clip_eps_high: float
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    correction: CorrectionConfig = _NO_CORRECTION
    denominator: int = 1
    """Loss tokens of the whole step, skipped samples included."""


@dataclass(frozen=True)
class LossSums:
    """What a set of tokens adds to the step. `a + b` is the result of both sets together."""

    loss: Tensor
    """Scalar: this set's share of the step's loss; carries the gradient until detached."""
    policy_loss: float = 0.0
    """This set's share of the clipped surrogate."""
    kl: float = 0.0
    """Sum over tokens of the KL estimate."""
    entropy: float = 0.0
    """Sum over tokens."""
    clipped: float = 0.0
    """Tokens whose gradient the clipping removed."""
    ratio: float = 0.0
    """Sum over tokens of the importance ratio to the rollout."""
    ratio_max: float = 0.0
    k3: float = 0.0
    """Sum over tokens of exp(d) - 1 - d with d = trainer logprob - rollout logprob."""
    logprob_diff_max: float = 0.0
    """Largest |d|."""
    truncated: float = 0.0
    """Tokens whose weight was truncated (tasks/update/corrections.py)."""
    masked: float = 0.0
    """Tokens that a token or a sequence mask dropped."""
    weight: float = 0.0
    """Sum over tokens of the corrections' weights."""
    tokens: int = 0

    def __add__(self, other: "LossSums") -> "LossSums":
        combine = dict.fromkeys(LARGEST, max)
        return LossSums(
            **{
                field.name: combine.get(field.name, lambda a, b: a + b)(
                    getattr(self, field.name), getattr(other, field.name)
                )
                for field in fields(self)
            }
        )


def grpo_loss(tokens: LossInputs, config: LossConfig) -> LossSums:
    """Clipped surrogate with token-level aggregation, plus the KL penalty.

    With ratio r = exp(logprob - rollout logprob) and advantage A, a token's policy loss is
    -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (PPO, arXiv:1707.06347, eq. 7; GRPO, arXiv:2402.03300), and tokens
    are averaged over the whole step, not per sample (DAPO, arXiv:2503.14476, eq. 12).
    """
    difference_N = tokens.logprobs - tokens.rollout_logprobs
    weights = token_weights(difference_N, config.correction)
    weight_N = weights.weight_N if tokens.kept is None else weights.weight_N * tokens.kept
    # A correction has k as a constant: what is left to clip is the policy's own change.
    corrected = config.correction.tokens != "none"
    ratio_N = (tokens.logprobs - tokens.logprobs.detach()).exp() if corrected else difference_N.exp()
    clipped_ratio_N = ratio_N.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    plain_N = -ratio_N * tokens.advantages * weight_N
    clipped_N = -clipped_ratio_N * tokens.advantages * weight_N
    policy_loss = torch.maximum(plain_N, clipped_N).sum() / config.denominator
    loss, kl = policy_loss, 0.0
    if config.kl_coef > 0:
        assert tokens.reference_logprobs is not None
        kl_sum = kl_estimate(tokens.logprobs, tokens.reference_logprobs, config.kl_estimator).sum()
        loss = policy_loss + config.kl_coef * kl_sum / config.denominator
        kl = kl_sum.item()
    with torch.no_grad():
        k_N = difference_N.exp()
        dropped = weights.masked if tokens.kept is None else (weight_N == 0).sum().item()
        return LossSums(
            loss=loss,
            policy_loss=policy_loss.item(),
            kl=kl,
            entropy=tokens.entropy.sum().item(),
            clipped=(clipped_N > plain_N).sum().item(),
            ratio=k_N.sum().item(),
            ratio_max=k_N.max().item() if len(k_N) else 0.0,
            k3=_k3(difference_N.double()).sum().item(),
            logprob_diff_max=difference_N.abs().max().item() if len(ratio_N) else 0.0,
            truncated=weights.truncated,
            masked=dropped,
            weight=weight_N.sum().item(),
            tokens=len(ratio_N),
        )


def kl_estimate(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's samples, [N].

    With log q/p = reference - policy: k1 = -log(q/p), k2 = (log(q/p))^2 / 2, k3 = q/p - 1 - log(q/p)
    (Schulman, http://joschu.net/blog/kl-approx.html). All are estimates of the value; as a loss, k1's expected
    gradient is zero on policy, k2's is the gradient of the reverse KL.
    """
    log_ratio_N = reference_logprobs_N - logprobs_N
    if estimator == "k1":
        return -log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    return _k3(log_ratio_N)


def _k3(log_ratio_N: Tensor) -> Tensor:
    """exp(x) - 1 - x, which is never negative; exp(x) - 1 in one, or small ratios would be lost in rounding."""
    return log_ratio_N.expm1() - log_ratio_N
