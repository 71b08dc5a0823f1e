"""The settings that name an idea, one of ours or a file of the user's: a loss, an advantage."""

from flows.config import TrainConfig

IDEAS = {"loss": ("update", "loss"), "advantage": ("reward", "advantage")}
"""(group, setting) of each."""


def ideas_of(config: TrainConfig) -> dict[str, str]:
    """Name or path of each."""
    return {name: getattr(getattr(config, group), setting) for name, (group, setting) in IDEAS.items()}


def check_ideas(config: TrainConfig) -> None:
    """Raises BadInput for one that there is not, and for settings that it has not, before anything starts."""
    from tasks.reward.advantage import advantage_of

    advantage_of(config.reward)
    if config.update.loss != "grpo" or config.update.loss_args:
        from tasks.update.loss import policy_loss  # needs torch, which a flow does without

        policy_loss(config.update)
