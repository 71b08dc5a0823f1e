"""What an evaluation found."""

from flows.reporting.confidence import Estimate
from infra.config import Config
from infra.storage.artifacts import ArtifactRef


class Evaluation(Config):
    """What an evaluation found."""

    run: str
    """The evaluated version's run."""
    version: int
    """Its number."""
    policy: ArtifactRef
    """The version."""
    environment: str
    """What was to be solved."""
    dataset: ArtifactRef
    """The prompts."""
    split: str
    """Of the dataset."""
    samples: int
    """Responses a prompt."""
    confidence: float
    """Of the intervals."""
    accuracy: Estimate
    """Mean reward over prompts."""
    baseline_run: str | None = None
    """The baseline's run."""
    baseline_version: int | None = None
    """Its number; null: there is none."""
    baseline: Estimate | None = None
    """Its accuracy on the same prompts."""
    gain: Estimate | None = None
    """Accuracy minus the baseline's, paired by prompt."""
