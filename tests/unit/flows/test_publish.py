"""Whether a published version gets the alias: only if the evaluation says so."""

from typing import Any

import pytest

from flows.config import PublishConfig
from flows.evaluate import Evaluation
from flows.intervals import Estimate
from flows.publish import decide
from infra.artifacts import ArtifactRef
from tasks.publish.registry import Registered

REF = ArtifactRef(kind="policy", uri="file:///x", digest="blake3:00")
NEW = Registered(name="m", version="2")


def judged(low: float, mean: float, high: float) -> Evaluation:
    gain = Estimate(mean=mean, low=low, high=high, standard_error=0.01, prompts=17)
    accuracy = Estimate(mean=0.7, low=0.6, high=0.8, standard_error=0.02, prompts=17)
    return Evaluation(
        run="r", version=15, policy=REF, environment="addition", dataset=REF, split="heldout", samples=8,
        confidence=0.95, accuracy=accuracy, baseline_run="r", baseline_version=0, baseline=accuracy, gain=gain,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("low", "settings", "promoted"),
    [
        (0.1, {}, True),
        (0.0, {}, False),
        (-0.05, {}, False),
        (-0.05, {"minimum_gain": -0.1}, True),
        (0.1, {"minimum_gain": 0.2}, False),
    ],
)
def test_the_lower_end_of_the_gain_decides(low: float, settings: dict[str, Any], promoted: bool):
    config = PublishConfig(run="r", **settings)
    found, why = decide(config, judged(low, 0.2, 0.3), NEW, incumbent=None)
    assert found is promoted
    assert "version 0 of run r" in why and "+0.200" in why


def test_the_holder_of_the_alias_is_not_promoted_over_itself():
    found, why = decide(PublishConfig(run="r"), judged(0.1, 0.2, 0.3), NEW, incumbent=NEW)
    assert not found
    assert "already" in why
