"""Settings: every profile is valid, and a wrong one is told by its key's path before anything starts."""

import subprocess
import sys
import time

import pytest
import yaml

from flows.config import PROFILES, RESUMABLE, TrainConfig, load_config
from infra.errors import BadInput


@pytest.mark.parametrize("profile", sorted(path.stem for path in PROFILES.glob("*.yaml")))
def test_every_profile_is_a_valid_config(profile: str):
    load_config(profile)


def test_overrides_replace_settings_by_path():
    config = load_config("smollm2-cpu", ["update.lr=3e-5", "run=mine", "steps=7"])
    assert (config.update.lr, config.run, config.steps) == (3e-5, "mine", 7)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["update.learning_rate=1"], r"update\.learning_rate: unknown setting; valid here: .*lr"),
        (["stepz=3"], r"stepz: unknown setting; valid here: .*steps"),
        (["steps=0"], r"steps: .*greater than or equal to 1 \(got 0\)"),
        (["rollout.temperature=0.5"], r"update\.temperature \(1\.0\) must equal rollout\.temperature \(0\.5\)"),
        (["warm_start.steps=5", "update.kl_coef=0.1"], r"warm_start\.steps: .*kl_coef"),
        (["update.replay=rollout", "rollout.routes=off"], r"rollout\.routes is off; set it to auto"),
        (["update.replay_weights=true"], r"replay_weights needs replay recorded, not auto"),
        (["update.parallel.virtual=2"], r"parallel\.virtual splits pipeline stages: it needs parallel\.pipeline > 1"),
        (["steps.x=1"], r"steps is a value, not a group of settings"),
        (["steps"], r"not of the form path\.to\.key=value"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_be_valid(overrides: list[str], message: str):
    with pytest.raises(BadInput, match=message):
        load_config("smollm2-cpu", overrides)


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(BadInput, match="neither a YAML file nor one of: .*smollm2-cpu"):
        load_config("smollm3")


def test_a_profile_that_is_no_yaml_mapping_is_refused(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(BadInput, match="a mapping of settings is expected, not a list"):
        load_config(str(path))


def test_a_config_survives_the_form_it_is_shown_as():
    config = load_config("smollm2-cpu")
    assert TrainConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_the_identity_of_a_run_leaves_out_what_may_change_on_resume():
    identity = load_config("smollm2-cpu").identity()
    assert not identity.keys() & set(RESUMABLE)
    assert identity == load_config("smollm2-cpu", ["steps=99", "run=other", "store=elsewhere"]).identity()
    assert identity != load_config("smollm2-cpu", ["update.lr=0.1"]).identity()


def test_every_setting_has_a_help_text():
    missing = []

    def visit(model, path: str) -> None:
        for name, field in model.model_fields.items():
            if not field.description:
                missing.append(f"{path}{name}")
            if hasattr(field.annotation, "model_fields"):
                visit(field.annotation, f"{path}{name}.")

    visit(TrainConfig, "")
    assert not missing


def test_importing_a_flow_loads_no_engine():
    code = "import sys, flows.train; print([m for m in ('torch', 'vllm', 'megatron', 'transformers', 'ray') if m in sys.modules])"
    started = time.monotonic()
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]", (
        f"a flow must hold no weights, and start in seconds ({time.monotonic() - started:.0f} s)"
    )
