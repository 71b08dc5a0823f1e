"""`python -m flows`: profiles in layers, what can be set, and what the settings come to; nothing of it starts anything."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows import __main__ as shell
from flows import help
from flows.config import EvaluateConfig, PublishConfig, TrainConfig
from flows.runs import RunsConfig
from flows.settings import apply_overrides, known_profiles, load_config, parse_config, settings_of
from infra.errors import BadInput


def said(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of `python -m flows *words`; it may not start a flow."""
    monkeypatch.setattr(shell, "start", lambda *_: pytest.fail("a flow was started"))
    monkeypatch.setattr(shell.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["flows", *words])
    status = shell.main()
    return status, *capsys.readouterr()


def overlay(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_of_profiles_in_layers_the_later_ones_win_setting_by_setting(tmp_path: Path):
    mine = overlay(tmp_path, "mine.yaml", "update: {lr: 1.0e-4}\nrollout: {prompts_per_step: 4}\nsteps: 7\n")
    last = overlay(tmp_path, "last.yaml", "steps: 9\n")
    config = load_config(["smollm2-cpu", mine, last], ["rollout.prompts_per_step=2"])
    base = load_config("smollm2-cpu")
    assert (config.steps, config.update.lr, config.rollout.prompts_per_step) == (9, 1e-4, 2)
    assert config.update.precision == base.update.precision == "float32"
    assert config.rollout.max_model_len == base.rollout.max_model_len == 256


def test_a_list_of_a_later_profile_replaces_the_earlier_one(tmp_path: Path):
    mine = overlay(tmp_path, "mine.yaml", "lora: {targets: [linear_qkv]}\n")
    assert load_config(["beam-lora", mine]).lora.targets == ("linear_qkv",)


def test_a_fault_names_the_last_profile_that_says_something_of_the_setting(tmp_path: Path):
    low = overlay(tmp_path, "low.yaml", "update: {lr: -1, max_grad_norm: -1}\n")
    high = overlay(tmp_path, "high.yaml", "update: {lr: -2}\n")
    with pytest.raises(BadInput) as refused:
        load_config(["smollm2-cpu", low, high])
    assert [line.strip().partition(": Input")[0] for line in str(refused.value).splitlines()] == [
        "profile high.yaml: update.lr",
        "profile low.yaml: update.max_grad_norm",
    ]


@pytest.mark.parametrize("late", ["beam-tiny-cpu", "mine.yaml"])
def test_a_profile_behind_a_setting_is_refused(late: str):
    with pytest.raises(BadInput, match=f"override: '{late}' is not .*; a profile comes first"):
        shell.settings("train", ["smollm2-cpu", "steps=3", late])


def test_the_printed_config_is_a_profile_that_makes_the_same_config(tmp_path: Path, monkeypatch, capsys):
    for profile in known_profiles():
        status, out, _ = said("train", profile, "steps=3", "--print-config", monkeypatch=monkeypatch, capsys=capsys)
        assert status == 0
        again = overlay(tmp_path, "again.yaml", out)
        assert load_config(again) == load_config(profile, ["steps=3"])


def test_print_config_tells_a_wrong_setting_like_a_start(monkeypatch, capsys):
    told = said("train", "smollm2-cpu", "stepz=3", "--print-config", monkeypatch=monkeypatch, capsys=capsys)
    assert told[0] == 2 and told[2].startswith("error: stepz: unknown setting; did you mean steps?")


@pytest.mark.parametrize("flow", ["evaluate", "publish"])
def test_the_other_flows_print_their_settings(flow: str, monkeypatch, capsys):
    status, out, _ = said(flow, "run=r", "version=3", "--print-config", monkeypatch=monkeypatch, capsys=capsys)
    config = parse_config(shell.config_of(flow), yaml.safe_load(out))
    assert status == 0 and config == parse_config(shell.config_of(flow), apply_overrides({}, ["run=r", "version=3"]))


@pytest.mark.parametrize(
    ("flow", "kind"),
    [
        ("train", TrainConfig),
        ("prepare", TrainConfig),
        ("evaluate", EvaluateConfig),
        ("publish", PublishConfig),
        ("runs", RunsConfig),
    ],
)
def test_help_lists_every_setting(flow: str, kind, monkeypatch, capsys):
    status, out, _ = said(flow, "--help", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("  ") and "; " in line and line[2] != " "}
    groups = {path.rpartition(".")[0] for path, _ in settings_of(kind)}
    assert listed == {
        path for path, _ in settings_of(kind) if path not in groups or (path == "dataset" and kind is not TrainConfig)
    }


@pytest.mark.parametrize(
    ("path", "kind", "default", "text"),
    [
        ("steps", "integer >= 1", "40", "Optimizer steps."),
        ("run", "text or null", "null", "The run's name."),
        ("precision", "bf16|mxfp8", "bf16", "bf16: as `update.precision` and `update.weights` say in the trainer"),
        ("update.lr", "number > 0", "1e-05", ""),
        ("sync.verify_fresh", "true|false", "true", ""),
        (
            "dataset.environment_args",
            "mapping",
            "{}",
            'Settings of the environment, e.g. {"low": 1, "high": 99} for addition.',
        ),
    ],
)
def test_a_line_of_the_help(path: str, kind: str, default: str, text: str):
    (found,) = [setting for setting in help.settings(TrainConfig) if setting.path == path]
    assert (found.kind, found.default) == (kind, default)
    assert found.text.startswith(text)


def test_the_first_sentence_does_not_end_in_an_abbreviation():
    assert help.first_sentence("The split, e.g. Test of\ngsm8k. Null: none.") == "The split, e.g. Test of gsm8k."
    assert help.first_sentence("At 0.5 it is half. More.") == "At 0.5 it is half."
    assert help.first_sentence("No full stop") == "No full stop"


def test_without_words_the_help_is_printed_and_lists_the_flows(monkeypatch, capsys):
    status, out, _ = said(monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0 and out.startswith("usage: python -m flows")
    assert all(f"    {flow} " in out for flow in shell.FLOWS)


def test_help_is_there_in_a_second_and_makes_no_folder(tmp_path: Path):
    code = "import sys; from flows.__main__ import main; sys.argv = ['flows', 'train', '--help']; main(); print('prefect' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment(tmp_path)
    )
    assert ran.stdout.splitlines()[-1] == "False", "help needs no Prefect, which takes seconds to import"
    assert not (tmp_path / "home").exists()


def _environment(tmp_path: Path) -> dict[str, str]:
    import os

    return os.environ | {"POLICYFLOW_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "home" / "prefect")}
