"""What a set of tokens adds to a step: the policy loss, corrected and reduced, the KL penalty, the entropy bonus, metrics.

Every sum is over tokens, so results of disjoint sets of tokens add up: the gradient does not depend on how a step is split
into microbatches or chunks.
"""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from tasks.update.config import CorrectionConfig, KlEstimator
from tasks.update.corrections import token_weights
from tasks.update.kl import k3, kl_estimate
from tasks.update.loss import Loss, Tokens

_NO_CORRECTION = CorrectionConfig()
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
    """Of the policy's next-token distribution; carries a gradient if there is an entropy bonus."""
    before_logprobs: Tensor | None = None
    """Of the trainer's policy before the batch's first optimizer step; None: this is the first."""
    reference_logprobs: Tensor | None = None
    """Of the reference policy; needed if kl_coef > 0."""
    kept: Tensor | None = None
    """1 for tokens of responses that count, 0 for those that a sequence mask dropped; None: all count."""
    prepared: Tensor | None = None
    """What the policy loss's `prepare` gave."""
    scale: Tensor | None = None
    """What each token weighs in the step (tasks/update/reductions.py); None: 1 / denominator."""


@dataclass(frozen=True)
class LossConfig:
    """What the step's loss depends on besides the tokens."""

    policy: Loss
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    correction: CorrectionConfig = _NO_CORRECTION
    old: Literal["rollout", "trainer"] = "rollout"
    """Which policy ratios are taken to: the one that sampled, or the trainer's before the batch's first optimizer step. With
    a correction of tokens, which weighs what lies between the two, it is the trainer's."""
    denominator: int = 1
    """Loss tokens of the whole optimizer step, skipped samples included."""

    @property
    def ratios_to_trainer(self) -> bool:
        """See `old`."""
        return self.old == "trainer" or self.correction.tokens != "none"


@dataclass(frozen=True)
class LossSums:
    """What a set of tokens adds to the step. `a + b` is the result of both sets together."""

    loss: Tensor
    """Scalar: this set's share of the step's loss; carries the gradient until detached."""
    policy_loss: float = 0.0
    """This set's share of the policy loss."""
    kl: float = 0.0
    """Sum over tokens of the KL estimate."""
    entropy: float = 0.0
    """Sum over tokens."""
    clipped: float = 0.0
    """Tokens whose gradient the policy loss removed or bounded."""
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


def step_loss(inputs: LossInputs, config: LossConfig) -> LossSums:
    """The loss of N tokens: the policy's, times the corrections' weights, plus kl_coef KL, minus entropy_coef entropy."""
    before_N = inputs.logprobs.detach() if inputs.before_logprobs is None else inputs.before_logprobs
    mismatch_N = before_N - inputs.rollout_logprobs
    old_N = before_N if config.ratios_to_trainer else inputs.rollout_logprobs
    weights = token_weights(mismatch_N, config.correction)
    weight_N = weights.weight_N if inputs.kept is None else weights.weight_N * inputs.kept
    policy = config.policy.tokens(Tokens(inputs.logprobs, old_N, inputs.advantages, inputs.prepared))

    def reduced(values_N: Tensor) -> Tensor:
        return values_N.sum() / config.denominator if inputs.scale is None else (values_N * inputs.scale).sum()

    def weighted(coef: float, values_N: Tensor) -> Tensor:
        if inputs.scale is None:
            return coef * values_N.sum() / config.denominator
        return coef * (values_N * inputs.scale).sum()

    # In this order: runs of before are replayed bit for bit.
    loss = policy_loss = reduced(policy.loss * weight_N)
    kl_sum = 0.0
    if config.kl_coef > 0:
        assert inputs.reference_logprobs is not None
        kl_N = kl_estimate(inputs.logprobs, inputs.reference_logprobs, config.kl_estimator)
        kl_sum = kl_N.sum().item()
        loss = loss + weighted(config.kl_coef, kl_N)
    if config.entropy_coef > 0:
        loss = loss - weighted(config.entropy_coef, inputs.entropy)
    with torch.no_grad():
        k_N = (inputs.logprobs - inputs.rollout_logprobs).exp()
        dropped = weights.masked if inputs.kept is None else (weight_N == 0).sum().item()
        return LossSums(
            loss=loss,
            policy_loss=policy_loss.item(),
            kl=kl_sum,
            entropy=inputs.entropy.sum().item(),
            clipped=(policy.clipped & (weight_N > 0)).sum().item(),
            ratio=k_N.sum().item(),
            ratio_max=k_N.max().item() if len(k_N) else 0.0,
            k3=k3(mismatch_N.double()).sum().item(),
            logprob_diff_max=mismatch_N.abs().max().item() if len(k_N) else 0.0,
            truncated=weights.truncated,
            masked=dropped,
            weight=weight_N.sum().item(),
            tokens=len(k_N),
        )
