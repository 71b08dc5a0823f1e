"""The vLLM engine as a resident engine: what a flow says of it, and what its actor does with that."""

from typing import TYPE_CHECKING

from infra.config import Config
from infra.numerics.mxfp8 import Mxfp8Config
from infra.policy.adapters import LoraConfig
from infra.policy.follow import follow
from infra.storage.artifacts import ArtifactRef
from tasks.rollout.config import RolloutConfig

if TYPE_CHECKING:
    from tasks.rollout.engine import RolloutEngine


class RolloutLoader(Config):
    """Loads vLLM with a model."""

    model: str
    """A Hugging Face folder."""
    config: RolloutConfig
    """Sampling and the engine's own settings."""
    lora: LoraConfig | None = None
    """The adapter that is served; None: the whole policy is replaced."""
    mxfp8: Mxfp8Config | None = None
    """How linear layers and experts multiply; None: as `config.dtype` says."""

    def load(self) -> "RolloutEngine":
        """See `RolloutEngine`."""
        from tasks.rollout.engine import RolloutEngine

        return RolloutEngine(self.model, self.config, self.lora, self.mxfp8)

    def follow(self, engine: "RolloutEngine", version: ArtifactRef) -> None:
        """Bring it to a policy version."""
        follow(engine, version)
