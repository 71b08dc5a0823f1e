"""Finding an environment: by name, by module, by path; and what is said when there is none."""

import re
from pathlib import Path

import pytest

from environments import environment_reference, load_environment, load_reference, refers_to, reward_keywords
from infra.errors import BadInput
from tasks.reward.verifiers import Request, Verdict, VerifierPool

SOURCE = """
from .words import GREETING

class Greeting:
    name = "greeting"

    def __init__(self, word):
        self.word = word

    def reward(self, response, answer, metadata):
        return float(self.word in response)

def load_environment(word: str = GREETING):
    return Greeting(word)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "greeting"
    path.mkdir()
    (path / "__init__.py").write_text(SOURCE)
    (path / "words.py").write_text("GREETING = 'hello'\n")
    return path


def test_a_folder_with_modules_of_its_own_is_loaded_by_its_path(folder: Path):
    assert load_environment(str(folder)).reward("hello there", None, {}) == 1.0
    assert load_environment(str(folder), word="bye").reward("hello there", None, {}) == 0.0


def test_an_installed_module_is_loaded_by_its_dotted_name(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(folder.parent))
    assert load_environment("greeting").name == "greeting"


def test_an_unknown_name_lists_those_that_there_are():
    with pytest.raises(BadInput, match="no such environment; there are: .*addition"):
        load_environment("additon")


def test_an_import_missing_inside_an_environment_is_not_reported_as_a_wrong_name(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_installed\n")
    with pytest.raises(BadInput, match="cannot be imported: ModuleNotFoundError.*a_package_that_is_not_installed"):
        load_environment(str(tmp_path / "broken.py"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def load_environment(:", "cannot be imported: SyntaxError"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("def load_environment(): return [][0]", r"load_environment\(\) failed: IndexError"),
    ],
)
def test_what_an_environments_own_code_raises_is_bad_input_that_names_it(tmp_path: Path, code: str, message: str):
    (tmp_path / "mine.py").write_text(code + "\n")
    with pytest.raises(BadInput, match=rf"environment '{tmp_path}/mine.py': {message}"):
        load_environment(str(tmp_path / "mine.py"))


def test_a_path_without_an_environment_is_named(tmp_path: Path):
    with pytest.raises(BadInput, match="no such file; expected a .py file or a folder"):
        load_environment(str(tmp_path))


def test_an_unknown_setting_lists_those_that_the_environment_has():
    with pytest.raises(BadInput, match="'lowest'; its settings are: low: int = 1, high: int = 9"):
        load_environment("addition", lowest=1)


@pytest.mark.parametrize(
    ("source", "message"),
    [("", "has no function load_environment"), ("def load_environment(): return 3", "lacks a `name` or a `reward")],
)
def test_a_module_that_is_no_environment_is_refused(tmp_path: Path, source: str, message: str):
    (tmp_path / "odd.py").write_text(source)
    with pytest.raises(BadInput, match=message):
        load_environment(str(tmp_path / "odd.py"))


def test_a_reference_carries_the_settings_and_what_the_source_is_but_not_where(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder.parent)
    reference = environment_reference("./greeting", {"word": "bye {now}"})
    monkeypatch.chdir("/")
    assert re.fullmatch(r'greeting@[0-9a-f]{32} \{"word": "bye \{now\}"\}', reference)
    assert reference == environment_reference(str(folder), {"word": "bye {now}"})
    assert load_reference(reference).reward("bye {now}", None, {}) == 1.0
    assert environment_reference("addition", {}) == "addition"


REWARD = """
class Counting:
    name = "counting"
    def reward(self, response, answer, metadata, {more}): return 0.0
def load_environment(): return Counting()
"""


def test_a_reward_names_what_it_is_given_besides(tmp_path: Path):
    def loaded(more: str) -> dict[str, bool]:
        (tmp_path / f"{len(more)}.py").write_text(REWARD.format(more=more))
        return reward_keywords(load_environment(str(tmp_path / f"{len(more)}.py")))

    assert reward_keywords(load_environment("addition")) == {}
    assert loaded("response_ids, finish_reason=None") == {"response_ids": True, "finish_reason": False}
    assert loaded("tolerance=0.1, **others") == {"tolerance": False}, "a default of its own is the environment's affair"
    with pytest.raises(BadInput, match="asks for 'prompt'; besides .* may have: response_ids, finish_reason"):
        loaded("*, prompt")


def test_a_moved_environment_is_the_same_one_and_another_source_is_not(folder: Path, tmp_path: Path):
    reference = environment_reference(str(folder), {})
    there = folder.rename(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="no such file"):
        load_reference(reference)
    assert refers_to(reference, str(there))
    assert load_reference(reference).reward("hello", None, {}) == 1.0
    (there / "words.py").write_text("GREETING = 'bye'\n")
    with pytest.raises(BadInput, match=rf"environment 'greeting': .* {there} has changed; dataset.environment must be"):
        load_reference(reference)
    assert not refers_to(reference, str(there))
    assert load_environment(str(there)).reward("bye", None, {}) == 1.0, "the changed source, not the loaded one"


def test_only_python_source_counts_and_caches_do_not(folder: Path):
    reference = environment_reference(str(folder), {})
    load_environment(str(folder))  # leaves __pycache__
    (folder / "output.log").write_text("of a run")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "library.py").write_text("")
    assert environment_reference(str(folder), {}) == reference


def test_a_row_alone_does_not_say_where_code_is(folder: Path):
    unknown = f"greeting@{'0' * 32}"
    with pytest.raises(BadInput, match="environment 'greeting': .*no setting says where that is"):
        load_reference(unknown)
    assert load_reference(f'{folder} {{"word": "x"}}').reward("x", None, {}) == 1.0, "rows of before have the path"
    assert refers_to(str(folder), str(folder)) and refers_to('addition {"high": 9}', "addition")


def test_processes_that_score_are_told_the_place(folder: Path, tmp_path: Path):
    reference = environment_reference(str(folder), {"word": "bye"})
    environment_reference(str(folder.rename(tmp_path / "moved")), {})
    pool = VerifierPool(reference, timeout_s=20, workers=1)
    assert pool.score([Request("bye", None, {})]) == [Verdict({"reward": 1.0})]
    pool.close()
