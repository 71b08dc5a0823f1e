"""A loss or an advantage of one's own: its content is the run's, its place may change; recipes are settings on a profile."""

import shutil
from pathlib import Path

import pytest

from flows.config import PLACES, EvaluateConfig, TrainConfig
from flows.ideas import check_ideas
from flows.session import note_places
from flows.settings import known_recipes, load_config
from flows.versions import run_config
from infra.errors import BadInput
from infra.runs.run import Run
from tasks.reward.advantage import advantage_of

MINE = """
from tasks.reward.advantage import Advantage, Rewards

class Mine(Advantage):
    def of(self, rewards: Rewards):
        return rewards.values
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text(MINE)
    return tmp_path / "here" / "mine.py"


def with_advantage(path: Path) -> TrainConfig:
    return load_config("smollm2-cpu", [f"reward.advantage={path}"])


def opened(run: Run, config: TrainConfig) -> bool:
    return run.open(config.identity() | {"model_fingerprint": "f"}, PLACES, TrainConfig.defaults())


def test_a_run_goes_on_where_the_file_has_moved_and_not_where_it_has_changed(mine: Path, tmp_path: Path):
    run = Run(store=f"file://{tmp_path}/store", name="r")
    assert not opened(run, with_advantage(mine))
    moved = shutil.copy(mine, tmp_path / "mine.py")
    assert opened(run, with_advantage(moved))
    moved.write_text(MINE + "# changed\n")
    with pytest.raises(
        BadInput, match=r"reward\.advantage: the run has 'mine@[0-9a-f]{32}', this start asks for 'mine@"
    ):
        opened(run, with_advantage(moved))


def test_an_evaluation_finds_the_file_where_the_run_was_last_trained(mine: Path, tmp_path: Path):
    run = Run(store=f"file://{tmp_path}/store", name="r")
    config = with_advantage(mine)
    opened(run, config)
    note_places(run, Path("/models/mine"), config)
    found = run_config(EvaluateConfig(run="r", store=run.store))
    assert found.reward.advantage == str(mine)
    assert type(advantage_of(found.reward)).__name__ == "Mine"


@pytest.mark.parametrize("recipe", known_recipes())
def test_a_recipe_is_settings_on_a_profile(recipe: str):
    plain, config = load_config("smollm2-cpu"), load_config(["smollm2-cpu", recipe])
    check_ideas(config)
    assert config.model == plain.model
    assert {"reward", "update"} >= {
        name for name in config.identity() if config.identity()[name] != plain.identity()[name]
    }


def test_an_unknown_recipe_is_told_with_those_that_there_are():
    with pytest.raises(BadInput, match="nor a recipe: cispo, dapo"):
        load_config(["smollm2-cpu", "grop"])


def test_one_sample_a_prompt_is_for_advantages_that_compare_the_step():
    assert load_config(["smollm2-cpu", "reinforce_pp"], ["rollout.samples_per_prompt=1"])
    with pytest.raises(BadInput, match="must be at least 2"):
        load_config("smollm2-cpu", ["rollout.samples_per_prompt=1"])
