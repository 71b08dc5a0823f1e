"""How far two implementations of one policy may be apart: their logprobs of the same tokens, by what they compute in."""

from typing import NamedTuple

import numpy as np


class Limits(NamedTuple):
    """What logprobs may differ by, in nats."""

    largest: float
    """A token's."""
    mean: float | None = None
    """The mean of all tokens'; None: no limit but the one above."""


_EXACT = Limits(0.02)
"""fp32: 3e-5 was seen."""
_ROUNDED = Limits(10, 0.3)
"""16-bit numbers: a deep model carries single roundings on, and random tokens, where it is sure of nothing, or experts that
are a hair apart make most of them. In bf16 SmolLM2 was seen 0.4 apart, 0.08 in the mean, a small Beam 1.3, 0.026 in the
mean; of a wrong tensor the mean tells, a whole nat and more."""
_QUANTISED = Limits(10, 0.7)
"""MXFP8 in both: a number next to a rounding boundary falls to either side. SmolLM2: 2, 0.2 in the mean, and with bf16 between
the products 3.4, 0.37 in the mean."""
_QUANTISED_IN_ONE = Limits(10, 1.0)


def limits(*arithmetic: str) -> Limits:
    """For two that compute in these: `float32`, `bfloat16`, `float16` or `mxfp8`."""
    if "mxfp8" in arithmetic:
        return _QUANTISED if set(arithmetic) == {"mxfp8"} else _QUANTISED_IN_ONE
    return _EXACT if set(arithmetic) == {"float32"} else _ROUNDED


class Difference(NamedTuple):
    """|a - b| of logprobs, in nats."""

    largest: float
    mean: float

    def beyond(self, limits: Limits) -> str | None:
        """By how much it is more than `limits` allow; None: it is not. A NaN is."""
        for found, limit, how in ((self.largest, limits.largest, ""), (self.mean, limits.mean, " in the mean")):
            if limit is not None and not found <= limit:
                return f"{found:.3g} nats{how} (at most {limit:g} is allowed)"
        return None


def difference(one: list[list[float]], other: list[list[float]]) -> Difference:
    """Of the logprobs of the same sequences of equal length."""
    apart = np.abs(np.array(one) - np.array(other))
    return Difference(float(apart.max()), float(apart.mean()))
