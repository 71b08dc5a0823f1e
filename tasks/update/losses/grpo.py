"""PPO's clipped surrogate, as GRPO has it."""

from typing import ClassVar

from pydantic import Field

from tasks.update.loss import Loss, TokenLoss, Tokens, clipped_surrogate


class Grpo(Loss):
    """-min(r A, clip(r, 1 - clip_eps_low, 1 + clip_eps_high) A).

    PPO, arXiv:1707.06347, eq. 7; GRPO, arXiv:2402.03300, eq. 3; a larger clip_eps_high is DAPO's clip-higher,
    arXiv:2503.14476.
    """

    takes: ClassVar[tuple[str, ...]] = ("clip_eps_low", "clip_eps_high")

    clip_eps_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_eps_low; default: `update.clip_eps_low`."""
    clip_eps_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + clip_eps_high; default: `update.clip_eps_high`."""

    def tokens(self, tokens: Tokens) -> TokenLoss:
        """See `Loss`."""
        return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, self.clip_eps_low, self.clip_eps_high)
