"""The dataset task: the same prompts are one artifact, changed prompts are another."""

import json

from infra.runs.stages import Stage
from infra.storage.artifacts import open_artifact
from tasks.dataset.config import DatasetConfig
from tasks.dataset.task import prepare_dataset
from tests.support.models import write_tiny_llama


def write(path, answers: list[int]) -> None:
    path.write_text("".join(json.dumps({"prompt": f"What is {n}?", "answer": n}) + "\n" for n in answers))


def test_a_file_that_changed_is_another_dataset(tmp_path):
    path = tmp_path / "train.jsonl"
    config = DatasetConfig(source="files", path=str(path), heldout_size=1)
    stage = Stage(store=f"file://{tmp_path}/store", folder="datasets", name="d", settings=config.digest())
    write(path, [1, 2, 3])
    first = prepare_dataset.fn(stage, config)
    assert prepare_dataset.fn(stage, config) == first
    assert open_artifact(first).metadata["prompts"] == {"train": 2, "heldout": 1}
    write(path, [1, 2, 4])
    second = prepare_dataset.fn(stage, config)
    assert second.uri != first.uri


def test_prompts_longer_than_max_prompt_tokens_are_dropped_and_counted(tmp_path):
    model = write_tiny_llama(tmp_path / "model")  # its tokens are bytes
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length, "answer": 1}) + "\n" for length in (20, 30, 31, 200)))
    config = DatasetConfig(source="files", path=str(path), heldout_size=0, max_prompt_tokens=30)
    stage = Stage(store=f"file://{tmp_path}/store", folder="datasets", name="d", settings=config.digest())
    metadata = open_artifact(prepare_dataset.fn(stage, config, str(model))).metadata
    assert (metadata["prompts"]["train"], metadata["dropped"]["too_long"]) == (2, 2)
