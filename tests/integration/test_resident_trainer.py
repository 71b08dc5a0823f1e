"""The trainer behind the update task: a step is applied once, and a lost trainer is rebuilt bit for bit."""

import json
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infra.policy.version import digest_tensors
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef, open_artifact
from infra.storage.schemas import DEMONSTRATION, SCORED
from tasks.update.config import UpdateConfig
from tasks.update.resident import ResidentTrainer, follow, update
from tests.support.models import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def scored(seed: int) -> pa.Table:
    """Two prompts with three samples each; advantages that sum to zero."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in range(2):
        prompt_ids = rng.integers(0, 256, 6).tolist()
        for sample, advantage in enumerate((1.0, 0.0, -1.0)):
            rows.append(
                {
                    "prompt_id": str(prompt),
                    "sample": sample,
                    "prompt_ids": prompt_ids,
                    "response_ids": rng.integers(0, 256, 5).tolist(),
                    "logprobs": [-5.5] * 5,
                    "finish_reason": "length",
                    "policy_version": "",
                    "seed": 0,
                    "response_text": "",
                    "environment": "checksum",
                    "answer": json.dumps(1),
                    "reward": 0.0,
                    "reward_parts": "{}",
                    "advantage": advantage,
                    "loss_mask": [True] * 5,
                }
            )
    return pa.Table.from_pylist([{**dict.fromkeys(SCORED.names), **row} for row in rows], schema=SCORED)


class Steps:
    """A run of four steps, driven as the flow drives it."""

    def __init__(self, folder: Path, model: Path):
        self.run = Run(store=f"file://{folder}/store", name="r")
        self.model = model
        with self.run.stage("base", 0, []).write("update") as writer:
            pass
        self.base = writer.ref
        self.batches: list[ArtifactRef] = []
        for step in range(4):
            with self.run.stage("reward", step, []).write("scored") as writer:
                writer.table("scored", scored(step))
            self.batches.append(writer.ref)

    def trainer(self) -> ResidentTrainer:
        config = UpdateConfig(lr=1e-3, microbatch_tokens=32)
        return ResidentTrainer(str(self.model), config, 0, self.run.store, f"runs/{self.run.name}/checkpoints")

    def step(self, trainer: ResidentTrainer, parent: ArtifactRef, step: int, checkpoint: bool = False) -> ArtifactRef:
        follow(trainer, parent)
        stage = self.run.stage("update", step, [parent, self.batches[step]])
        return update(trainer, stage, self.batches[step], checkpoint)


def digest(trainer: ResidentTrainer) -> str:
    return digest_tensors(trainer.trainer.export())


def test_a_lost_trainer_is_rebuilt_bit_for_bit(tmp_path: Path, model: Path):
    steps = Steps(tmp_path, model)
    trainer = steps.trainer()
    head, digests = steps.base, []
    updates = []
    for step in range(4):
        head = steps.step(trainer, head, step, checkpoint=step == 1)
        digests.append(digest(trainer))
        updates.append(head)
    assert len(set(digests)) == 4, "every step changes the policy"
    trainer.finish_saving()

    from_checkpoint = steps.trainer()
    follow(from_checkpoint, updates[3])
    assert digest(from_checkpoint) == digests[3]

    from_the_base = steps.trainer()
    follow(from_the_base, updates[0])
    assert digest(from_the_base) == digests[0]
    follow(from_the_base, updates[2])
    assert digest(from_the_base) == digests[2]

    follow(from_the_base, updates[1])  # back to an older version
    assert digest(from_the_base) == digests[1]


def test_a_new_trainer_is_at_the_base_and_is_not_loaded_again(tmp_path: Path, model: Path):
    steps = Steps(tmp_path, model)
    trainer = steps.trainer()
    loaded = trainer.trainer
    follow(trainer, steps.base)
    assert trainer.trainer is loaded
    steps.step(trainer, steps.base, 0)
    follow(trainer, steps.base)
    assert trainer.trainer is not loaded, "an update cannot be taken back but by loading"


def test_a_trainer_that_is_replaced_is_gone(tmp_path: Path, model: Path):
    config = UpdateConfig(weights="bfloat16")  # with fp32 masters beside the weights
    trainer = ResidentTrainer(str(model), config, 0, f"file://{tmp_path}/store", "checkpoints")
    old = [weakref.ref(master) for master in trainer.trainer.optimizer.masters.values()]
    trainer.reset()
    assert not any(master() is not None for master in old), "they would be held beside the new one's"


def test_a_step_whose_reply_was_lost_is_not_applied_again(tmp_path: Path, model: Path):
    steps = Steps(tmp_path, model)
    trainer = steps.trainer()
    first = steps.step(trainer, steps.base, 0)
    after = digest(trainer)
    again = steps.step(trainer, steps.base, 0)
    assert again == first
    follow(trainer, first)
    assert digest(trainer) == after


def test_a_step_that_was_applied_but_not_committed_starts_from_its_parent_again(tmp_path: Path, model: Path):
    steps = Steps(tmp_path, model)
    undisturbed = steps.trainer()
    steps.step(undisturbed, steps.base, 0)
    expected = digest(undisturbed)

    other = Steps(tmp_path / "other", model)
    trainer = other.trainer()
    follow(trainer, other.base)
    trainer.apply(other.batches[0])  # the process of the commit failed here
    other.step(trainer, other.base, 0)
    assert digest(trainer) == expected


def test_a_lost_trainer_goes_through_the_warm_start_again_bit_for_bit(tmp_path: Path, model: Path):
    steps = Steps(tmp_path, model)
    rows = [{"prompt_id": str(n), "messages": "", "text": f"{n} and", "solution": f" {n + 1}"} for n in range(5)]
    settings = {"steps": 4, "samples_per_step": 3, "lr": 1e-2}
    with steps.run.stage("demonstrations", 0, []).write("demonstrations", metadata={"settings": settings}) as writer:
        writer.table("demonstrations", pa.Table.from_pylist(rows, schema=DEMONSTRATION))
    trainer = steps.trainer()
    follow(trainer, steps.base)
    before = digest(trainer)
    stage = steps.run.stage("warm-start", 0, [steps.base, writer.ref])
    warm = update(trainer, stage, writer.ref, checkpoint=False)
    assert digest(trainer) != before
    metrics = open_artifact(warm).metadata["metrics"]
    assert metrics["loss_last"] < metrics["loss_first"] and metrics["steps"] == 4
    head = steps.step(trainer, warm, 0)

    rebuilt = steps.trainer()
    follow(rebuilt, head)
    assert digest(rebuilt) == digest(trainer)
