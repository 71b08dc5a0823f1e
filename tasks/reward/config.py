"""How responses are scored."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from infra.config import LATER, Config
from infra.sources import idea_reference, known_ideas, named
from tasks.reward import advantages


class RewardConfig(Config):
    """Rewards, advantages, and which samples are trained on."""

    advantage: str = Field("grpo", examples=known_ideas(advantages))
    """What a sample's reward is compared with: a name of [tasks/reward/advantages](algorithms.md#advantages), or the path of a
    file of yours (docs/extending.md)."""
    advantage_args: Annotated[dict[str, Any], LATER] = {}
    """The advantage's own settings."""
    std_eps: float = Field(1e-4, gt=0)
    """grpo: added to the standard deviation."""
    credit: Annotated[Literal["episode", "turn"], LATER] = "episode"
    """What is compared within a group, and gets an advantage. episode: its reward. turn: the discounted return of each turn,
    its own reward and those of the turns after it (an episode's reward that no turn gave is its last turn's)."""
    discount: Annotated[float, LATER] = Field(1.0, ge=0, le=1)
    """credit turn: what a reward is worth one turn earlier."""
    weights: dict[str, float] = {}
    """Weight of each part of the environment's reward; a part that is not named has 1, and one of weight 0 is reported
    only."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds that one response's reward may take; then its process is killed and the sample masked."""
    workers: int = Field(2, ge=1)
    """Processes that compute rewards. A step waits at most samples / workers * timeout_s for verifiers that hang."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """Responses cut at max_new_tokens. keep: like any other. mask: they count in their group's statistics, but nothing
    is learned from them. drop: they leave the batch before the statistics."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal, and whose advantages therefore are 0. drop: spares the trainer their tokens
    (with a KL term they would still pull)."""

    @field_validator("advantage")
    @classmethod
    def _known(cls, advantage: str) -> str:
        return named(advantages, advantage)

    def stored(self) -> dict[str, Any]:
        """See `Config.stored`; an advantage of one's own is its content, wherever the file lies."""
        return super().stored() | {"advantage": idea_reference(self.advantage)}
