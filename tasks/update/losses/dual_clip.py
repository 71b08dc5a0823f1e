"""PPO's clipped surrogate with a bound for bad tokens that became likely."""

from typing import ClassVar

import torch
from pydantic import Field

from tasks.update.loss import Loss, TokenLoss, Tokens, clipped_surrogate


class DualClip(Loss):
    """The loss of `grpo`; where A < 0 at most -c A.

    With A < 0 and a large ratio the surrogate -r A has no bound; arXiv:1912.09729: max(min(r A, clip(r) A), c A).
    """

    takes: ClassVar[tuple[str, ...]] = ("clip_eps_low", "clip_eps_high")

    clip_eps_low: float = Field(0.2, ge=0, lt=1)
    """As in `grpo`."""
    clip_eps_high: float = Field(0.2, ge=0)
    """As in `grpo`."""
    c: float = Field(3.0, gt=1)
    """The largest ratio of a token with a negative advantage."""

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        once = clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, self.clip_eps_low, self.clip_eps_high)
        bound_N = -self.c * tokens.advantages
        over_N = (tokens.advantages < 0) & (once.loss > bound_N)
        return TokenLoss(torch.where(over_N, bound_N, once.loss), once.clipped | over_N)
