"""Group sequence policy optimization: the ratio of whole responses."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from tasks.update.loss import Loss, Response, TokenLoss, Tokens, clipped_surrogate


class Gspo(Loss):
    """-min(s A, clip(s, 1 - low, 1 + high) A) with s_t = sg[s] * pi / sg[pi], s the geometric mean of the response's ratios.

    GSPO-token, arXiv:2507.18071, eq. 14 and 15; equal to GSPO in value and gradient where a response's tokens have
    one advantage. Made for update.reduction sequence_mean.
    """

    low: float = Field(3e-4, ge=0, lt=1)
    """s is clipped below at 1 - low (section 5.1)."""
    high: float = Field(4e-4, ge=0)
    """s is clipped above at 1 + high (section 5.1)."""

    def prepare(self, responses: Sequence[Response], seed: int) -> list[Tensor]:
        """log s, for each token of the response."""
        return [(one.logprobs - one.old_logprobs).mean().expand(len(one.logprobs)) for one in responses]

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        assert tokens.prepared is not None
        ratio_N = torch.exp(tokens.logprobs - tokens.logprobs.detach() + tokens.prepared)
        return clipped_surrogate(ratio_N, tokens.advantages, self.low, self.high)
