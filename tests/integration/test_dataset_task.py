"""The dataset task: the same prompts are one artifact, changed prompts are another."""

import json

from infra.artifacts import open_artifact
from infra.run import Stage
from tasks.dataset.config import DatasetConfig
from tasks.dataset.task import prepare_dataset


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
