"""How responses are scored."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

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
    overlong_length: Annotated[int | None, LATER] = Field(None, ge=1)
    """Tokens at which a response gets the whole `overlong_penalty`, e.g. rollout.max_new_tokens; for episodes, all that the
    policy sampled in one. None: length costs nothing. Held-out rewards are without it."""
    overlong_buffer: Annotated[int | None, LATER] = Field(None, ge=1)
    """Tokens before `overlong_length` over which the penalty grows from nothing (DAPO)."""
    overlong_penalty: Annotated[float, LATER] = Field(1.0, gt=0)
    """What a response of `overlong_length` tokens loses of its reward."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal, and whose advantages therefore are 0. drop: spares the trainer their tokens
    (with a KL term they would still pull)."""

    @field_validator("advantage")
    @classmethod
    def _known(cls, advantage: str) -> str:
        return named(advantages, advantage)

    @model_validator(mode="after")
    def _overlong_together(self) -> Self:
        length, buffer = self.overlong_length, self.overlong_buffer
        if (length is None) != (buffer is None):
            raise ValueError("overlong_length and overlong_buffer go together: set both, or neither")
        if length is not None and buffer is not None and buffer > length:
            raise ValueError(f"overlong_buffer {buffer} is longer than overlong_length {length}")
        if length is not None and self.credit == "turn":
            raise ValueError("overlong_length is of a whole response: it needs credit episode")
        return self

    def stored(self) -> dict[str, Any]:
        """See `Config.stored`; an advantage of one's own is its content, wherever the file lies."""
        return super().stored() | {"advantage": idea_reference(self.advantage)}
