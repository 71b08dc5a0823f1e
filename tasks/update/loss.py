"""What a policy loss is: a pure function of tokens. Each is one file of tasks/update/losses/, or a file of yours.

Every loss is written for a token, so that results of disjoint sets of tokens add up: the gradient does not depend on how a
step is split into microbatches, chunks or processes. What a token needs to know of the others (its response's mean, the
step's covariance) `prepare` computes before, from logprobs without a gradient.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from infra.config import Config
from infra.errors import BadInput
from infra.sources import find_idea, make_idea
from tasks.update import losses
from tasks.update.config import UpdateConfig


@dataclass(frozen=True)
class Tokens:
    """N tokens that count in the loss. All tensors are float [N]; logprobs in nats, at the sampling temperature."""

    logprobs: Tensor
    """Of the policy that is trained; carries the gradient."""
    old_logprobs: Tensor
    """Of the policy that ratios are taken to: the rollout's, or the trainer's own before the step."""
    advantages: Tensor
    """Each token's."""
    prepared: Tensor | None = None
    """What `prepare` gave for these tokens."""

    @property
    def log_ratio(self) -> Tensor:
        """log of policy / old policy."""
        return self.logprobs - self.old_logprobs


@dataclass(frozen=True)
class TokenLoss:
    """What a loss makes of N tokens."""

    loss: Tensor
    """[N], to be minimised; carries the gradient."""
    clipped: Tensor
    """bool [N]: tokens whose gradient the loss removed or bounded (a metric)."""


@dataclass(frozen=True)
class Response:
    """The loss tokens of one response, before the optimizer step. All tensors are float32 [R], without a gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor


class Loss(Config):
    """A policy loss; its fields are its settings (`update.loss_args`)."""

    takes: ClassVar[tuple[str, ...]] = ()
    """Settings of `update` that are its own, by these names."""

    def prepare(self, responses: Sequence[Response], seed: int) -> list[Tensor]:
        """A constant for each token of each response, of all of an optimizer step's that have a gradient; a class that has
        this costs one more forward pass. seed: of what it draws; the same in every process and whenever the step is replayed."""
        return []

    @property
    def prepares(self) -> bool:
        """Whether its class has a `prepare` of its own."""
        return type(self).prepare is not Loss.prepare

    @abstractmethod
    def tokens(self, tokens: Tokens) -> TokenLoss:
        """The loss of each token."""


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO, arXiv:1707.06347, eq. 7."""
    plain_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - low, 1 + high) * advantages_N
    return TokenLoss(torch.maximum(plain_N, clipped_N), clipped_N > plain_N)


def none_clipped(loss_N: Tensor) -> TokenLoss:
    """Of a loss that bounds nothing."""
    return TokenLoss(loss_N, torch.zeros_like(loss_N, dtype=torch.bool))


def policy_loss(config: UpdateConfig) -> Loss:
    """The loss that the settings name. Raises BadInput for one that there is not, and for settings that it has not."""
    kind = find_idea(Loss, losses, config.loss, "update.loss")
    given = dict(config.loss_args)
    for name in ("clip_eps_low", "clip_eps_high"):
        value, default = getattr(config, name), UpdateConfig.model_fields[name].default
        if name in kind.takes:
            given.setdefault(name, value)
        elif value != default:
            known = ", ".join(kind.model_fields) or "none"
            raise BadInput(f"update.{name} is set, but update.loss {config.loss} has no such setting; it has: {known}")
    return make_idea(kind, given, "update.loss_args")
