"""REINFORCE."""

from tasks.update.loss import Loss, TokenLoss, Tokens, none_clipped


class PolicyGradient(Loss):
    """-A log pi (Williams, 1992, doi:10.1007/BF00992696): no ratio, nothing clipped."""

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        return none_clipped(-tokens.advantages * tokens.logprobs)
