"""What a person reads of a step: figures that were measured, and steps that are counted from 1."""

import pytest

from flows.reporting import recorder, report
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef, ArtifactWriter
from infra.storage.store import Store

REF = ArtifactRef(kind="scored", uri="file:///s", digest="blake3:00")
REWARD = {
    "reward/mean": 0.5,
    "reward/groups": 8.0,
    "reward/groups_zero_variance": 3.0,
    "reward/masked_samples": 0.0,
    "reward/samples": 64.0,
    "reward/groups_mixed_share": 0.625,
}
UPDATE = {"update/k3_mean": 1e-9, "update/entropy": 2.0, "update/grad_norm": 1.5, "update/updated": 1.0}
TIMES = {"seconds/rollout": 1.0, "seconds/update": 1.0, "seconds/sync": 1.0, "tokens_per_s": 100.0}
IDLE = {"reward/groups_zero_variance": 8.0, "update/updated": 0.0}


def committed(store: Store, updated: float, groups_mixed: str = "groups_mixed_share") -> ArtifactRef:
    """The update of a first step, as the stages leave it."""
    with ArtifactWriter(
        store, "rollouts", "rollout", metadata={"tokens": 10}, provenance={"engine_s": 1.0}
    ) as rollouts:
        pass
    rewards = {"reward_mean": 0.5, "groups": 8.0, groups_mixed: 0.25, "groups_zero_variance": 6.0}
    made = {"metadata": {"metrics": rewards}, "provenance": {"engine_s": 0.1}, "inputs": [rollouts.ref]}
    with ArtifactWriter(store, "scored", "scored", **made) as scored:
        pass
    update = {"updated": updated, "entropy": 2 * updated, "grad_norm": updated, "k3_mean": 0.0, "lr": 1e-5}
    made = {"metadata": {"step": 0, "metrics": update}, "provenance": {"engine_s": 1.0}, "inputs": [REF, scored.ref]}
    with ArtifactWriter(store, "update", "update", **made) as writer:
        pass
    return writer.ref


def test_a_step_without_differing_rewards_says_so_and_prints_no_figures_of_an_update():
    line = report.step_line(2, 15, REWARD | TIMES | IDLE, eta_s=60)
    assert line.startswith("step   3/15  reward 0.500  nothing to learn: all 8 groups have equal rewards  |")
    assert "entropy" not in line and "grad norm" not in line
    page = report.step_markdown(2, REWARD | IDLE, [], REF)
    assert "# Step 3\n\nNothing to learn: all 8 groups have equal rewards. The policy is as before.\n" in page


def test_a_step_that_learns_prints_its_figures():
    line = report.step_line(0, 15, REWARD | TIMES | UPDATE, eta_s=60)
    assert "entropy 2.00  grad norm 1.50  |" in line and "nothing to learn" not in line


def test_masked_samples_are_named_where_not_all_groups_are_equal():
    metrics = REWARD | {"update/updated": 0.0, "reward/masked_samples": 40.0}
    assert report.nothing_learned(metrics) == [
        "nothing to learn: 3 of 8 groups have equal rewards, 40 of 64 samples are masked"
    ]


@pytest.mark.parametrize(
    ("updated", "known"), [(0.0, {"updated", "lr"}), (1.0, {"updated", "lr", "entropy", "grad_norm", "k3_mean"})]
)
def test_zeros_that_nobody_measured_are_no_metrics(tmp_path, updated: float, known: set[str]):
    metrics = recorder.committed_step(committed(Store.at(str(tmp_path)), updated))["metrics"]
    assert {name.removeprefix("update/") for name in metrics if name.startswith("update/")} == known


@pytest.mark.parametrize("stored", ["groups_mixed", "groups_mixed_share"])
def test_the_share_of_mixed_groups_is_named_as_one_in_stores_of_before_too(tmp_path, stored: str):
    metrics = recorder.committed_step(committed(Store.at(str(tmp_path)), 1.0, stored))["metrics"]
    assert metrics["reward/groups_mixed_share"] == 0.25 and "reward/groups_mixed" not in metrics


def test_pictures_and_the_runs_page_take_steps_that_measured_nothing():
    history = [
        {"step": 0, "metrics": REWARD | UPDATE},
        {"step": 1, "metrics": {"reward/mean": 1.0, "update/updated": 0.0}},
    ]
    assert report.curves(history).startswith(b"\x89PNG")
    assert report.curves(history[1:]).startswith(b"\x89PNG")
    lines = report.run_markdown("r", {}, {}, history).splitlines()
    assert lines[-2:] == ["| 1 | 0.500 | 1.0e-09 | 1.50 |", "| 2 | 1.000 | - | - |"]


@pytest.mark.parametrize(
    ("task", "stage", "step", "name"),
    [
        ("rollout", "rollout", 0, "rollout, step 1"),
        ("reward", "reward", 7, "reward, step 8"),
        ("update", "update", 7, "update, step 8"),
        ("publish", "policy", 8, "publish, version 8"),
        ("sync", "ack", 8, "sync, version 8"),
        ("rollout", "evaluation-rollout", 0, "evaluation rollout, version 0"),
        ("reward", "evaluation-reward", 8, "evaluation reward, version 8"),
        ("checkpoint", "checkpoint", 8, "checkpoint, version 8"),
        ("warm start", "warm-start", 0, "warm start"),
    ],
)
def test_a_task_run_is_named_by_its_step_counted_from_1_or_its_version(task: str, stage: str, step: int, name: str):
    from infra.orchestration.stage_task import run_name

    made = Run(store="file:///s", name="r").stage(stage, step, [])
    assert run_name(task, made) == name


def test_a_dataset_is_of_no_step():
    from infra.orchestration.stage_task import run_name
    from infra.runs.stages import Stage

    assert run_name("dataset", Stage(store="file:///s", folder="datasets", name="addition")) == "dataset"
