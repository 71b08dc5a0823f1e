"""Settings of weight sync."""

from typing import Literal

from pydantic import Field

from infra.config import Config
from infra.numerics.tolerance import Limits, limits


class SyncConfig(Config):
    """How policy versions are committed and verified."""

    probe_sequences: int = Field(4, ge=1)
    """Token sequences in the probe batch, scored by trainer and engine after every sync."""
    probe_length: int = Field(32, ge=2)
    """Tokens in a probe sequence."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest |trainer - engine| logprob on the probe that a sync may show (nats). null: by what the two say that they compute
    in, 0.02 in fp32, else 10 (infra/numerics/tolerance.py)."""
    probe_mean_tolerance: float | None = Field(None, gt=0)
    """Largest mean of |trainer - engine| over the probe's tokens (nats). null: in fp32 no limit but the one above, in bf16 and
    fp16 0.3, in MXFP8 0.7, in MXFP8 against anything else 1."""
    verify_fresh: bool = True
    """At the end of a run, load a second engine with the last version and compare it with the resident one."""
    form: Literal["auto", "full"] = "auto"
    """auto: a version holds what changed since the one before (lossless). full: every version holds all tensors."""
    anchor_every: int = Field(10, ge=1)
    """Of versions, every how-manieth holds all tensors besides: where a fresh engine starts from."""
    keep_versions: int = Field(3, ge=1)
    """Policy versions whose tensors are kept while a run goes on; version 0 and the last one always are."""

    def limits(self, *arithmetic: str) -> Limits:
        """What two that compute in these may be apart: as set, or by default."""
        default = limits(*arithmetic)
        largest = default.largest if self.probe_tolerance is None else self.probe_tolerance
        return Limits(largest, default.mean if self.probe_mean_tolerance is None else self.probe_mean_tolerance)
