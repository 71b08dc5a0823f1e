"""Settings of weight sync."""

from typing import Literal

from pydantic import Field

from infra.config import Config


class SyncConfig(Config):
    """How policy versions are published and verified."""

    probe_sequences: int = Field(4, ge=1)
    """Token sequences in the probe batch, scored by trainer and engine after every sync."""
    probe_length: int = Field(32, ge=2)
    """Tokens in a probe sequence."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest |trainer - engine| logprob on the probe that a sync may show (nats). null: 0.02; with precision mxfp8 10."""
    probe_mean_tolerance: float | None = Field(None, gt=0)
    """Largest mean of |trainer - engine| over the probe's tokens (nats). null: no limit but the one above; with precision
    mxfp8 0.4: there a number next to a rounding boundary falls to either side in the two, a deep model carries that on, and
    single tokens differ by as much as MXFP8 costs at all (2 nats seen with SmolLM2, 0.2 in the mean). With mxfp8.train off,
    where the two compute in different precisions, 1."""
    verify_fresh: bool = True
    """At the end of a run, load a second engine with the last version and compare it with the resident one."""
    form: Literal["auto", "full"] = "auto"
    """auto: a version holds what changed since the one before (lossless). full: every version holds all tensors."""
    anchor_every: int = Field(10, ge=1)
    """Of versions, every how-manieth holds all tensors besides: where a fresh engine starts from."""
    keep_versions: int = Field(3, ge=1)
    """Policy versions whose tensors are kept while a run goes on; version 0 and the last one always are."""

    @property
    def tolerance(self) -> float:
        """`probe_tolerance`, or its default."""
        return 2e-2 if self.probe_tolerance is None else self.probe_tolerance
