"""Accuracy with its uncertainty. Prompts are the independent units: a prompt's samples are averaged first."""

from typing import Any

import numpy as np
import pyarrow as pa

from infra.config import Config
from infra.errors import BadInput
from infra.storage.artifacts import ArtifactRef, open_artifact

RESAMPLES = 10_000


class Estimate(Config):
    """A mean over prompts, with a confidence interval (bootstrap over prompts, percentile, fixed seed)."""

    mean: float
    """The mean."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    standard_error: float
    """Of the mean."""
    prompts: int
    """Prompts that it is a mean of."""


def estimate(values: list[float], confidence: float) -> Estimate:
    """The mean of one number a prompt. With a single prompt, or equal numbers, the interval has no width.

    Raises BadInput for no number at all: no sample could be judged."""
    if not values:
        raise BadInput("evaluation: no sample of any prompt could be judged, so there is no accuracy")
    from scipy.stats import bootstrap

    values_P = np.asarray(values, dtype=np.float64)
    mean, low, high, error = float(values_P.mean()), float(values_P.mean()), float(values_P.mean()), 0.0
    if len(values_P) > 1 and np.ptp(values_P) > 0:
        result: Any = bootstrap(
            (values_P,),
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=confidence,
            method="percentile",
            vectorized=True,
            batch=1000,
            rng=np.random.default_rng(0),
        )
        low, high = map(float, result.confidence_interval)
        error = float(np.std(values_P, ddof=1) / np.sqrt(len(values_P)))
    return Estimate(mean=mean, low=low, high=high, standard_error=error, prompts=len(values_P))


def paired_gain(new: dict[str, float], old: dict[str, float], confidence: float) -> Estimate:
    """The mean of new - old over the prompts, which must be the same. Raises BadInput when they are not."""
    if new.keys() != old.keys():
        raise BadInput(f"the two evaluations have {len(new.keys() ^ old.keys())} prompts that are not in both")
    if len(new) < 2:
        raise BadInput(f"a gain over {len(new)} prompts has no interval: evaluate at least 2")
    return estimate([new[prompt] - old[prompt] for prompt in sorted(new)], confidence)


def reward_by_prompt(scored: ArtifactRef) -> dict[str, float]:
    """prompt_id -> mean reward of its samples; an episode counts once, whatever its rows."""
    table = open_artifact(scored).table("scored")
    if "row" in table.column_names:
        table = table.filter(pa.array([row == 0 for row in table["row"].to_pylist()]))
    means = table.group_by("prompt_id").aggregate([("reward", "mean")])
    return dict(zip(means["prompt_id"].to_pylist(), means["reward_mean"].to_pylist(), strict=True))
