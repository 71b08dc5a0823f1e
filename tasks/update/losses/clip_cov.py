"""Clip-Cov: some tokens whose advantage goes with their logprob get no gradient, so that entropy lasts."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tasks.update.loss import Loss, Response, TokenLoss, Tokens, clipped_surrogate


class ClipCov(Loss):
    """The loss of `grpo`, and none for a share of the tokens, drawn among those with low < cov < high.

    cov = (A - mean A)(log pi - mean log pi), means over the step; arXiv:2505.22617.
    """

    takes: ClassVar[tuple[str, ...]] = ("clip_eps_low", "clip_eps_high")

    clip_eps_low: float = Field(0.2, ge=0, lt=1)
    """As in `grpo`."""
    clip_eps_high: float = Field(0.2, ge=0)
    """As in `grpo`."""
    share: float = Field(2e-4, gt=0, le=1)
    """Share of the step's tokens that get no gradient; one at least."""
    low: float = 1.0
    """Smallest covariance of a token that may be drawn."""
    high: float = 5.0
    """Largest covariance of a token that may be drawn."""

    def prepare(self, responses: Sequence[Response], seed: int) -> list[Tensor]:
        """1 for tokens that keep their loss, else 0."""
        covariance_T = covariance(responses)
        clipped_T = torch.cat([self._surrogate(one.logprobs, one).clipped for one in responses])
        among = ((covariance_T > self.low) & (covariance_T < self.high) & ~clipped_T).nonzero().squeeze(1)
        drawn = torch.randperm(len(among), generator=torch.Generator().manual_seed(seed))
        kept_T = torch.ones_like(covariance_T)
        kept_T[among[drawn[: max(int(self.share * len(covariance_T)), 1)]]] = 0
        return list(kept_T.split([len(one.logprobs) for one in responses]))

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        assert tokens.prepared is not None
        once = self._surrogate(tokens.logprobs, tokens)
        return TokenLoss(once.loss * tokens.prepared, once.clipped | (tokens.prepared == 0))

    def _surrogate(self, logprobs_N: Tensor, one: Response | Tokens) -> TokenLoss:
        ratio_N = (logprobs_N - one.old_logprobs).exp()
        return clipped_surrogate(ratio_N, one.advantages, self.clip_eps_low, self.clip_eps_high)


def covariance(responses: Sequence[Response]) -> Tensor:
    """(A - mean A)(log pi - mean log pi) of all tokens, [T]."""
    advantages_T = torch.cat([one.advantages for one in responses])
    logprobs_T = torch.cat([one.logprobs for one in responses])
    return (advantages_T - advantages_T.mean()) * (logprobs_T - logprobs_T.mean())
