"""Clipped importance weights: clipped tokens keep their gradient."""

from pydantic import Field

from tasks.update.loss import Loss, TokenLoss, Tokens


class Cispo(Loss):
    """-sg[clip(r, 1 - low, 1 + high)] A log pi.

    MiniMax-M1, arXiv:2506.13585: the clipped ratio is a constant weight of REINFORCE.
    """

    low: float = Field(1.0, ge=0, le=1)
    """The ratio is clipped below at 1 - low; 1: not at all, as in the paper."""
    high: float = Field(4.0, ge=0)
    """The ratio is clipped above at 1 + high. 1 + high is 5, as in ScaleRL (arXiv:2510.13786)."""

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        ratio_N = tokens.log_ratio.detach().exp()
        bounded_N = ratio_N.clamp(1 - self.low, 1 + self.high)
        return TokenLoss(-bounded_N * tokens.advantages * tokens.logprobs, bounded_N != ratio_N)
