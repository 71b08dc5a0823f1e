"""Soft adaptive policy optimization: a smooth gate instead of a clip."""

import torch
from pydantic import Field

from tasks.update.loss import Loss, TokenLoss, Tokens, none_clipped


class Sapo(Loss):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A.

    arXiv:2511.20347. Made for update.reduction sequence_mean.
    """

    tau_positive: float = Field(1.0, gt=0)
    """Of tokens with A > 0."""
    tau_negative: float = Field(1.05, gt=0)
    """Of tokens with A <= 0: larger, so that their gradient fades sooner."""

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        positive, negative = (tokens.logprobs.new_tensor(tau) for tau in (self.tau_positive, self.tau_negative))
        tau_N = torch.where(tokens.advantages > 0, positive, negative)
        gate_N = torch.sigmoid(tau_N * (tokens.log_ratio.exp() - 1)) * 4 / tau_N
        return none_clipped(-gate_N * tokens.advantages)
