"""The policy gradient, weighted by importance."""

from tasks.update.loss import Loss, TokenLoss, Tokens, none_clipped


class ImportanceSampling(Loss):
    """-r A: the surrogate of PPO (arXiv:1707.06347) without a clip."""

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        return none_clipped(-tokens.log_ratio.exp() * tokens.advantages)
