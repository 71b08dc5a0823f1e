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
        (["run=*x"], r"override: 'run=\*x': .*put quotes around"),
        (["update.lr=[1"], r"override: 'update\.lr=\[1': .*"),
        (["update.lr=.inf"], r"update\.lr: .*finite number"),
        (["evaluation.prompts=0"], r"evaluation\.prompts: .*greater than or equal to 1"),
        (["rollout.max_new_tokens=256"], r"max_new_tokens \(256\) must be below max_model_len \(256\)"),
        (["sync.probe_length=300"], r"sync\.probe_length \(300\) must be below rollout\.max_model_len \(256\)"),
        (
            ["dataset.source=files", "dataset.path=s3://me:secret@bucket/x.jsonl"],
            r"dataset\.path: credentials in a URL",
        ),
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["resources.update_gpus=2"],
            r"resources\.update_gpus \(2\) must be 1, or a share of one GPU: update\.parallel makes 1 process\(es\)",
        ),
        (
            ["resources.update_gpus=4", "update.parallel={tensor: 2, pipeline: 4, expert: 4}"],
            r"resources\.update_gpus \(4\) must be 16: update\.parallel makes 16",
        ),
        (["resources.rollout_gpus=1", "rollout.tensor_parallel_size=2"], r"resources\.rollout_gpus \(1\) must be 2: "),
        (
            ["resources.rollout_gpus=2", "rollout.engine={pipeline_parallel_size: 2, tensor_parallel_size: 2}"],
            r"resources\.rollout_gpus \(2\) must be 4: rollout\.\*_parallel_size makes 4",
        ),
        (["resources.rollout_memory_gib=0"], r"resources\.rollout_memory_gib: .*greater than 0 \(got 0\)"),
    ],
)
def test_gpus_are_as_many_as_the_engines_processes(overrides: list[str], message: str):
    with pytest.raises(BadInput, match=message):
        load_config("smollm2-cpu", overrides)


def test_no_gpus_or_a_share_of_one_are_enough_for_an_engine():
    load_config("smollm2-cpu", ["update.parallel.tensor=2", "rollout.tensor_parallel_size=2"])
    resources = load_config("smollm2-cpu", ["resources={rollout_gpus: 0.5, update_gpus: 0.4}"]).resources
    assert (resources.slots_needed(at_once=True), resources.gpus(at_once=False)) == (1, 0.5)
    both = load_config("beam-lora").resources
    assert (both.slots_needed(at_once=True), both.slots_needed(at_once=False)) == (8, 4)


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision=mxfp8"], r"engines without GPUs have no MXFP8 units; set mxfp8\.emulation to true"),
        (["precision=fp8"], r"precision: Input should be 'bf16' or 'mxfp8'"),
        (["policy=lora", "lora.rank=1024"], r"lora\.rank: .*less than or equal to 512"),
        (["policy=lora", "lora.targets=[]"], r"lora\.targets: name at least one module"),
        (["policy=lora", "lora.experts=shared_outer"], r"needs Megatron's grouped experts, which need a GPU"),
        (["policy=lora", "update.router_bias_rate=0.1"], r"changes the base model's routers"),
    ],
)
def test_an_impossible_policy_or_precision_is_refused(overrides: list[str], message: str):
    with pytest.raises(BadInput, match=message):
        load_config("smollm2-cpu", overrides)


def test_what_does_not_fit_the_model_is_refused_before_anything_starts(tmp_path):
    import torch
    from safetensors.torch import save_file

    shapes = {"self_attn.q_proj": (64, 48), "mlp.up_proj": (64, 64)}
    tensors = {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    load_config("smollm2-cpu", ["policy=lora", "lora.targets=[linear_fc1]"]).check_model(tmp_path)
    with pytest.raises(BadInput, match=r"lora\.targets: 'linear_fc2' matches no module of the model"):
        load_config("smollm2-cpu", ["policy=lora", "lora.targets=[linear_fc1, linear_fc2]"]).check_model(tmp_path)
    with pytest.raises(BadInput, match=r"q_proj\.weight is \[64, 48\], and both dimensions must be divisible by 32"):
        load_config("smollm2-cpu", ["precision=mxfp8", "mxfp8.emulation=true"]).check_model(tmp_path)


def test_the_probe_allows_what_a_precision_lets_trainer_and_engine_differ_by():
    def tolerance(*overrides: str) -> float:
        return load_config("smollm2-cpu", list(overrides)).sync.tolerance

    mxfp8 = ("precision=mxfp8", "mxfp8.emulation=true")
    assert tolerance() < tolerance(*mxfp8) < tolerance(*mxfp8, "mxfp8.train=false")
    assert tolerance(*mxfp8, "sync.probe_tolerance=0.1") == 0.1
