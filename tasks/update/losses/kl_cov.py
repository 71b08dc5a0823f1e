"""KL-Cov: the tokens whose advantage goes most with their logprob are held back."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from tasks.update.loss import Loss, Response, TokenLoss, Tokens, none_clipped
from tasks.update.losses.clip_cov import covariance


class KlCov(Loss):
    """-r A, plus coef |log r| for the share of the step's tokens with the largest covariance of advantage and logprob.

    arXiv:2505.22617, with the penalty of its code (the paper's KL, estimated by |log r|).
    """

    share: float = Field(2e-3, gt=0, le=1)
    """Share of the tokens; one at least."""
    coef: float = Field(1.0, ge=0)
    """Weight of the penalty."""

    def prepare(self, responses: Sequence[Response], seed: int) -> list[Tensor]:
        """1 for tokens that are held back, else 0."""
        covariance_T = covariance(responses)
        held_T = torch.zeros_like(covariance_T)
        held_T[covariance_T.topk(max(int(self.share * len(covariance_T)), 1)).indices] = 1
        return list(held_T.split([len(one.logprobs) for one in responses]))

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        assert tokens.prepared is not None
        penalty_N = self.coef * tokens.log_ratio.abs() * tokens.prepared
        return none_clipped(-tokens.log_ratio.exp() * tokens.advantages + penalty_N)
