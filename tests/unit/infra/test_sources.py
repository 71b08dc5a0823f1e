"""Source by its path, and one idea a file: what is found, and what is said where nothing is."""

import shutil
from pathlib import Path

import pytest

from infra.errors import BadInput
from infra.sources import find_idea, idea_reference, known_ideas, load_source, source_digest
from tasks.reward import advantages
from tasks.reward.advantage import Advantage


def test_an_idea_is_the_class_that_its_file_defines():
    assert "grpo" in known_ideas(advantages)
    for name in known_ideas(advantages):
        assert issubclass(find_idea(Advantage, advantages, name, "reward.advantage"), Advantage)


def test_a_source_is_its_content_wherever_it_lies(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__init__.py").write_text("VALUE = 1\n")
    (tmp_path / "a" / "more.py").write_text("")
    moved = Path(shutil.copytree(tmp_path / "a", tmp_path / "deep" / "a"))
    assert source_digest(tmp_path / "a") == source_digest(moved)
    assert idea_reference(str(moved)) == idea_reference(str(tmp_path / "a")) == f"a@{source_digest(moved)}"
    assert idea_reference("grpo") == "grpo"
    before = load_source(moved)
    (moved / "__init__.py").write_text("VALUE = 2\n")
    assert (before.VALUE, load_source(moved).VALUE) == (1, 2), "a changed source is another module"
    assert source_digest(tmp_path / "a") != source_digest(moved)


def test_a_source_that_fails_is_not_kept(tmp_path: Path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_source(tmp_path / "broken.py")
    with pytest.raises(BadInput, match="reward.advantage .*broken.py: cannot be imported: ZeroDivisionError"):
        find_idea(Advantage, advantages, str(tmp_path / "broken.py"), "reward.advantage")
