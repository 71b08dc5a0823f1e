"""Whether a published version gets the alias: only if the evaluation says so."""

from pathlib import Path
from typing import Any

import pytest

from flows.config import EvaluateConfig, PublishConfig
from flows.evaluate import versions_of
from flows.publish import baseline_of, decide, run_of
from flows.reporting.confidence import Estimate
from flows.reporting.evaluation import Evaluation
from flows.versions import find_version
from infra.errors import BadInput
from infra.runs.run import Head, Run
from infra.storage.artifacts import ArtifactRef
from infra.storage.store import Store
from tasks.publish.registry import Registered, check_model_name

REF = ArtifactRef(kind="policy", uri="file:///x", digest="blake3:00")
NEW = Registered(name="m", version="2")
OF_ITSELF = "version 0 of r is the model that the run started from: no gain over itself"


def judged(low: float, mean: float, high: float) -> Evaluation:
    gain = Estimate(mean=mean, low=low, high=high, standard_error=0.01, prompts=17)
    accuracy = Estimate(mean=0.7, low=0.6, high=0.8, standard_error=0.02, prompts=17)
    return Evaluation(
        run="r",
        version=15,
        policy=REF,
        environment="addition",
        dataset=REF,
        split="heldout",
        samples=8,
        confidence=0.95,
        accuracy=accuracy,
        baseline_run="r",
        baseline_version=0,
        baseline=accuracy,
        gain=gain,
    )


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


@pytest.mark.parametrize(("minimum_gain", "promoted"), [(0.0, False), (-0.1, True)])
def test_a_version_that_is_its_own_baseline_has_no_gain_and_says_so(minimum_gain: float, promoted: bool):
    alone = judged(0, 0, 0).model_copy(update={"baseline": None, "gain": None, "version": 0})
    found, why = decide(PublishConfig(run="r", minimum_gain=minimum_gain), alone, NEW, incumbent=None)
    assert found is promoted
    assert why == f"{'promoted to champion' if promoted else 'not promoted'}; {OF_ITSELF}"


def test_what_would_be_compared_with_itself_is_not_compared(file_store: Store):
    run = a_run(file_store, steps=2)
    versions = [find_version(run, number) for number in (0, 1, 2)]
    assert baseline_of(versions[0], incumbent=None) is None
    assert baseline_of(versions[2], incumbent=None) == versions[0]
    tags = {"policyflow.store": run.store, "policyflow.run": "r", "policyflow.version": "1"}
    holder = Registered(name="m", version="1", tags=tags)
    assert baseline_of(versions[1], holder) is None
    assert baseline_of(versions[2], holder) == versions[1]
    evaluated = {"run": "r", "store": file_store.url}
    assert versions_of(EvaluateConfig(version=0, **evaluated)) == (versions[0], None)
    assert versions_of(EvaluateConfig(version=2, baseline=2, **evaluated)) == (versions[2], None)
    assert versions_of(EvaluateConfig(version=2, **evaluated)) == (versions[2], versions[0])
    assert versions_of(EvaluateConfig(version=2, baseline=None, **evaluated)) == (versions[2], None)


def a_run(store: Store, steps: int) -> Run:
    """A run whose stages are committed, without what is in them."""
    run = Run(store=store.url, name="r")
    run.open({"model_fingerprint": "f", "model": "m"})
    with run.stage("base", 0, []).write("update") as writer:
        pass
    update = writer.ref
    for step in range(steps):
        with run.stage("reward", step, []).write("scored") as scored:
            pass
        with run.stage("update", step, [update, scored.ref]).write("update") as writer:
            pass
        update = writer.ref
    run.advance(None, Head(step=steps, update=update, policy=REF))
    return run


def test_the_run_of_a_registered_version_is_found_where_its_store_is_now_and_not_by_its_name_alone(tmp_path: Path):
    here = Run(store=f"file://{tmp_path}", name="r")
    tags = {"policyflow.store": "file:///before", "policyflow.run": "r"}
    elsewhere = Run(store="file:///before", name="r")
    assert run_of(tags, here.store) == elsewhere, "published before ids"
    assert run_of(tags | {"policyflow.id": "of another"}, here.store) == elsewhere
    assert run_of(tags | {"policyflow.id": here.id()}, here.store) == here


def test_the_holder_of_the_alias_is_not_promoted_over_itself():
    found, why = decide(PublishConfig(run="r"), judged(0.1, 0.2, 0.3), NEW, incumbent=NEW)
    assert not found
    assert "already" in why


@pytest.mark.parametrize("alias", ["latest", "Latest", "v1", "V22"])
def test_an_alias_that_mlflow_keeps_for_itself_is_refused_at_once(alias: str):
    with pytest.raises(ValueError, match=f"MLflow keeps '{alias}' for itself; choose another"):
        PublishConfig(run="r", alias=alias)


@pytest.mark.parametrize("folder", ["model:7b", "it's", "..", " ", 'a"b', "a\nb"])
def test_a_model_folder_whose_name_no_registered_model_can_have_needs_another(folder: str):
    with pytest.raises(BadInput, match=r"name: MLflow has no registered model called .*: set name"):
        check_model_name(folder)


def test_other_folders_name_their_model():
    assert [check_model_name(name) for name in ("smollm2", "my model #7?")] == ["smollm2", "my model #7?"]
