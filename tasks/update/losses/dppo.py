"""Divergence proximal policy optimization: the trust region is one of probabilities, not of their ratio."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from tasks.update.loss import Loss, TokenLoss, Tokens


class Dppo(Loss):
    """-M r A; M is 0 for a token that has moved with its advantage's sign by a divergence above delta, else 1.

    arXiv:2602.04879, with the binary divergences of the sampled token: total variation |pi - mu| (eq. 13), or
    KL(Bernoulli(mu) || Bernoulli(pi)) (eq. 14).
    """

    divergence: Literal["tv", "kl"] = "tv"
    """Which divergence."""
    delta_low: float = Field(0.1, gt=0)
    """The largest divergence of a token with A < 0."""
    delta_high: float = Field(0.1, gt=0)
    """The largest divergence of a token with A > 0."""

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        now_N, old_N = tokens.logprobs.detach(), tokens.old_logprobs
        further_N = now_N.exp() - old_N.exp()
        far_N = further_N.abs() if self.divergence == "tv" else _binary_kl(old_N, now_N)
        up_N = (tokens.advantages > 0) & (further_N > 0) & (far_N > self.delta_high)
        down_N = (tokens.advantages < 0) & (further_N < 0) & (far_N > self.delta_low)
        masked_N = up_N | down_N
        loss_N = -tokens.log_ratio.exp() * tokens.advantages
        return TokenLoss(torch.where(masked_N, 0.0, loss_N), masked_N)


def _binary_kl(log_p_N: Tensor, log_q_N: Tensor) -> Tensor:
    """KL of two coins with these log probabilities of heads; a coin that always shows heads has 1e-8 of tails."""
    rest_p_N, rest_q_N = (-torch.expm1(log) + 1e-8 for log in (log_p_N, log_q_N))
    tails_N = -torch.expm1(log_p_N)
    return log_p_N.exp() * (log_p_N - log_q_N) + tails_N * (rest_p_N.log() - rest_q_N.log())
