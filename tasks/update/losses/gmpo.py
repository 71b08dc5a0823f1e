"""Geometric-mean policy optimization."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from tasks.update.loss import Loss, Response, TokenLoss, Tokens


class Gmpo(Loss):
    """-A * geometric mean over the response of its ratios, each clipped to [exp(-low), exp(high)] where the step would go on.

    arXiv:2507.20673, with its clipping of tokens. Made for update.reduction sequence_mean.
    """

    low: float = Field(0.4, ge=0)
    """log r is clipped below at -low."""
    high: float = Field(0.4, ge=0)
    """log r is clipped above at high."""

    def prepare(self, responses: Sequence[Response], seed: int) -> list[Tensor]:
        """Mean of the clipped log ratios, for each token of the response."""
        return [
            self._clipped(one.logprobs - one.old_logprobs, one.advantages).mean().expand(len(one.logprobs))
            for one in responses
        ]

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        assert tokens.prepared is not None
        clipped_N = self._clipped(tokens.log_ratio, tokens.advantages)
        mean_N = torch.exp(clipped_N - clipped_N.detach() + tokens.prepared)
        return TokenLoss(-mean_N * tokens.advantages, clipped_N.detach() != tokens.log_ratio.detach())

    def _clipped(self, log_ratio_N: Tensor, advantages_N: Tensor) -> Tensor:
        """Of a good token at most high, of a bad one at least -low: min(s x, s clip(x)) with s the advantage's sign."""
        sign_N = torch.where(advantages_N < 0, -1.0, 1.0).to(log_ratio_N.dtype)
        return sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * log_ratio_N.clamp(-self.low, self.high))
