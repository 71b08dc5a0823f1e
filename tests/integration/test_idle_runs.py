"""A run whose every batch has nothing to learn from: it goes through, says so, and ends in the policy that it began with."""

import math

import pytest

from infra.runs.run import Run
from infra.storage.artifacts import find_artifact, open_artifact
from infra.storage.store import Store
from tests.support.models import write_tiny_llama
from tests.support.pipeline import Pipeline

# Responses are cut at one token, which nothing is learned from: every token is masked, or no row is left.
CUT = ["rollout.max_new_tokens=1", "steps=2", "checkpoint_every=1", "sync.verify_fresh=false"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("idle")
    return Pipeline(folder, write_tiny_llama(folder / "model"))


@pytest.mark.parametrize("truncated", ["mask", pytest.param("drop", marks=pytest.mark.slow)])
def test_a_run_with_nothing_to_learn_ends_in_its_first_policy(pipeline: Pipeline, truncated: str):
    output = pipeline.train(truncated, f"reward.truncated={truncated}", *CUT)
    assert output.count("nothing to learn: ") == 2
    assert "nothing to learn   in 2 of the steps" in output
    report = pipeline.report(truncated)
    assert report["idle_steps"] == 2 and report["k3_mean"] is None, "zeros that nobody measured are no figures"
    assert 0 < report["heldout_before"] == report["heldout_after"], "an evaluation counts what is not learned from"

    store = Store.at(str(pipeline.folder / "store"))
    made = {}  # step/stage -> its artifact
    for key in store.keys(f"runs/{truncated}/steps"):
        if key.endswith("/manifest.json") and (ref := find_artifact(store, key.rpartition("/")[0])):
            step, stage = key.split("/")[3:5]
            made[f"{step}/{stage.partition('-')[0]}"] = ref
    scored = [open_artifact(made[f"{step:05}/reward"]).table("scored") for step in range(2)]
    rows = 12 if truncated == "mask" else 0
    assert [table.num_rows for table in scored] == [rows, rows]
    assert not any(any(mask) for table in scored for mask in table["loss_mask"].to_pylist())
    for step in range(2):
        metrics = open_artifact(made[f"{step:05}/update"]).metadata["metrics"]
        assert all(map(math.isfinite, metrics.values()))
        assert (metrics["updated"], metrics["loss_tokens"], metrics["grad_norm"], metrics["loss"]) == (0, 0, 0, 0)
    digests = {open_artifact(made[f"{version:05}/policy"]).metadata["policy_digest"] for version in range(3)}
    assert digests == {report["policy_digest"]}

    head = Run(store=store.url, name=truncated).head()
    assert head is not None and head.step == 2
