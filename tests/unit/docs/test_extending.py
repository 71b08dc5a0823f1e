"""The examples of docs/extending.md do what the page says: its files are written, its diffs applied, its tests run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from environments import load_environment
from flows.ideas import check_ideas
from flows.settings import load_config
from tasks.dataset.prepare import prepare
from tasks.reward.advantage import advantage_of
from tasks.reward.scoring import check_reward
from tasks.update.loss import policy_loss

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)


def write_examples(folder: Path) -> None:
    """The files of the page, whose first line is a comment with their path."""
    for _, block in BLOCKS:
        if match := re.match(r"# (\S+\.(?:py|yaml))\n", block):
            path = folder / match[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_environment_rewards_its_own_solutions(examples: Path):
    spelling = load_environment("./spelling", heldout=4)
    problems = {split: list(spelling.problems(split, None, seed=0)) for split in ("train", "heldout")}
    assert len(problems["heldout"]) == 4
    assert not {p.answer for p in problems["train"]} & {p.answer for p in problems["heldout"]}
    for problem in problems["train"]:
        assert spelling.reward(spelling.solution(problem), problem.answer, {}) == {"letters": 1.0, "length": 1.0}
        assert spelling.reward(problem.answer, problem.answer, {})["length"] == 0.0
    assert sorted(p.answer for p in spelling.problems("train", None, seed=1)) == sorted(
        p.answer for p in problems["train"]
    )


def test_the_pipeline_takes_the_environment_by_the_command_there(examples: Path):
    command = re.search(r"flows train (smollm2-cpu run=spelling .*?)\n```", PAGE, re.S)
    assert command is not None
    profile, *overrides = command[1].replace("\\\n", " ").split()
    config = load_config(profile, overrides)
    assert (config.dataset.environment, config.reward.weights) == ("./spelling", {"length": 0.2})
    dataset = prepare(config.dataset)
    assert (dataset.train.num_rows, dataset.heldout.num_rows) == (12, 4)
    check_reward(dataset.train, config.reward, "the page")


def test_the_pipeline_takes_ones_own_data(examples: Path):
    (row,) = [block for _, block in BLOCKS if block.startswith('{"prompt"')]
    for name in ("capitals.jsonl", "capitals-heldout.jsonl"):
        (examples / name).write_text(row if name == "capitals.jsonl" else row.replace("France", "the French Republic"))
    config = load_config("capitals.yaml", ["run=capitals"])
    dataset = prepare(config.dataset)
    assert json.loads(dataset.train["answer"][0].as_py()) == "Paris"
    check_reward(dataset.train, config.reward, "the page")
    environment = load_environment(config.dataset.environment)
    assert [environment.reward(text, "Paris", {}) for text in ("It is Paris.", "It is London.")] == [1.0, 0.0]


def test_the_advantage_and_the_loss_work_as_they_stand_there(examples: Path):
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(examples)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([*command, "."], cwd=examples, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(name in run.stdout for name in ("test_batch_advantage.py", "test_masked_loss.py"))


def test_the_pipeline_takes_the_advantage_and_the_loss_by_the_commands_there(examples: Path):
    commands = re.findall(r"`python -m flows train (smollm2-cpu [^`]*)`", PAGE)
    configs = [load_config(words[0], words[1:]) for words in (command.split() for command in commands)]
    for config in configs:
        check_ideas(config)
    assert {advantage_of(config.reward).__class__.__name__ for config in configs} == {"Batch", "Grpo"}
    assert {policy_loss(config.update).__class__.__name__ for config in configs} == {"Masked", "Grpo"}
