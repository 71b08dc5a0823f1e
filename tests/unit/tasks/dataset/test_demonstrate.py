"""The environment's own solutions earn its full reward, and an environment without any is told so."""

import json
from pathlib import Path

import pytest

from environments import load_environment
from infra.errors import BadInput
from infra.storage.schemas import DEMONSTRATION, validate
from tasks.dataset.config import DatasetConfig
from tasks.dataset.demonstrate import demonstrate
from tasks.dataset.prepare import prepare

CHECKSUM = Path(__file__).parents[3] / "environments" / "checksum"


def test_solutions_are_those_of_the_train_prompts_in_order_and_right():
    prompts = prepare(DatasetConfig(environment="addition")).train
    table = validate(demonstrate(prompts), DEMONSTRATION)
    assert table["prompt_id"].to_pylist() == prompts["prompt_id"].to_pylist()
    reward = load_environment("addition").reward
    for row, solved in zip(prompts.to_pylist(), table.to_pylist(), strict=True):
        assert reward(solved["solution"], json.loads(row["answer"]), json.loads(row["metadata"])) == 1.0


def test_an_environment_without_solutions_is_refused():
    prompts = prepare(DatasetConfig(environment=str(CHECKSUM))).train
    with pytest.raises(BadInput, match=r"'checksum' has no solution\(problem\)"):
        demonstrate(prompts)


def test_a_solution_that_raises_is_the_environments_fault(tmp_path: Path):
    code = (
        (CHECKSUM / "__init__.py")
        .read_text()
        .replace(
            "    def reward", "    def solution(self, problem):\n        raise KeyError('steps')\n\n    def reward"
        )
    )
    (tmp_path / "unsolved.py").write_text(code)
    prompts = prepare(DatasetConfig(environment=str(tmp_path / "unsolved.py"))).train
    with pytest.raises(BadInput, match=r"unsolved.py': solution\(\) of prompt \w+ failed: KeyError: 'steps'"):
        demonstrate(prompts)
