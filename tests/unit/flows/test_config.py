"""Settings: every profile is valid, and a wrong one is told by its key's path before anything starts."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flows.config import RESUMABLE, EvaluateConfig, PublishConfig, TrainConfig
from flows.settings import PROFILES, apply_overrides, load_config, parse_config
from infra.config import Config
from infra.errors import BadInput


@pytest.mark.parametrize("profile", sorted(path.stem for path in PROFILES.glob("*.yaml")))
def test_every_profile_is_a_valid_config(profile: str):
    load_config(profile)


def test_overrides_replace_settings_by_path():
    config = load_config("smollm2-cpu", ["update.lr=3e-5", "run=mine", "steps=7", "store='/a #b'", "model=/c#d?e%20"])
    assert (config.update.lr, config.run, config.steps) == (3e-5, "mine", 7)
    assert (config.store, config.model) == ("/a #b", "/c#d?e%20")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["update.learning_rate=1"], r"update\.learning_rate: unknown setting; valid here: .*lr"),
        (["stepz=3"], r"^stepz: unknown setting; did you mean steps\? valid here: .*steps"),
        (["steps=0"], r"steps: .*greater than or equal to 1 \(got 0\)"),
        (["run=*x"], r"override: 'run=\*x': .*put quotes around"),
        (["update.lr=[1"], r"override: 'update\.lr=\[1': .*"),
        (["update.lr=.inf"], r"update\.lr: .*finite number"),
        (["evaluation.prompts=0"], r"evaluation\.prompts: .*greater than or equal to 1"),
        (["rollout.max_new_tokens=256"], r"max_new_tokens \(256\) must be below max_model_len \(256\)"),
        (
            ["rollout.engine={num_gpu_blocks_override: 8}"],
            r"num_gpu_blocks_override \(8\): vLLM keeps one block back, and 7 of 32 tokens hold no sequence of max_model_len "
            r"\(256\); give it 9 or more",
        ),
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
        (["run=.."], r"run: '\.\.' is no name; use letters"),
        (["run=''"], r"run: '' is no name"),
        (["run=" + "x" * 300], r"run: .* at most 63"),
        (["run=2026-13-45"], r"override: 'run=2026-13-45': .*"),
        (["store=/data/a #b"], r"override: 'store=/data/a #b': what follows a # is a comment; put quotes around"),
        (["tracking.experiment=''"], r"tracking\.experiment: "),
        (["lora={rank: 8, rank: 9}"], r"override: .* key 'rank' is given twice, on lines 1 and 1"),
        (["rollout.samples_per_prompt=1"], r"rollout\.samples_per_prompt \(1\) must be at least 2: .*grpo"),
        (
            ["rollout.engine={max_num_seq: 8}"],
            r"rollout\.engine: .*no argument 'max_num_seq'; did you mean max_num_seqs",
        ),
        (["rollout.engine={model: x}"], r"rollout\.engine: model is decided by the setting model"),
        (["rollout.engine={max_model_len: 8}"], r"rollout\.engine: max_model_len is decided by rollout\.max_model_len"),
        (["lr=1"], r"^lr: unknown setting; did you mean warm_start\.lr or update\.lr\? valid here: .*"),
        (["rollout.max_new_token=5"], r"did you mean rollout\.max_new_tokens.*\? valid here: .*temperature"),
        (["policy=lora", "lora.targets=linear_qkv"], r"^lora\.targets: a list is expected, as \[linear_qkv\]"),
        (["lora.rank=8"], r"^lora\.rank is set, but policy is full: set policy to lora, or leave lora out"),
        (["mxfp8.emulation=true"], r"^mxfp8\.emulation is set, but precision is bf16: set precision to mxfp8"),
        (
            ["precision=mxfp8", "mxfp8.emulation=true", "resources.update_gpus=1"],
            r"^mxfp8\.emulation replaces layers .* but resources\.update_gpus is 1",
        ),
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
            ["resources.update_gpus=4", "update.parallel={tensor: 2, pipeline: 4, data: 2, expert: 4}"],
            r"resources\.update_gpus \(4\) must be 16: update\.parallel makes 16",
        ),
        (["resources.rollout_gpus=1", "rollout.tensor_parallel_size=2"], r"resources\.rollout_gpus \(1\) must be 2: "),
        (
            ["resources.rollout_gpus=2", "rollout.tensor_parallel_size=2", "rollout.pipeline_parallel_size=2"],
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


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("false", "bool"), ("0", "int"), ("''", "str")])
def test_an_empty_value_that_is_no_mapping_is_no_empty_profile(tmp_path, text: str, kind: str):
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=f"a mapping of settings is expected, not a {kind}"):
        load_config(str(path))
    path.write_text("# nothing but defaults\n")
    assert load_config(str(path)) == TrainConfig()


def test_a_key_given_twice_is_refused_with_its_lines(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text("steps: 3\nupdate:\n  lr: 1e-5\n  clip_low: 0.2\n  lr: 1e-6\n")
    with pytest.raises(BadInput, match="profile .*: key 'lr' is given twice, on lines 3 and 5"):
        load_config(str(path))
    path.write_text("base: &b {lr: 1}\nupdate: {<<: *b, lr: 2}\n")  # what is merged in is there to be replaced
    with pytest.raises(BadInput, match="base: unknown setting"):
        load_config(str(path))


def test_of_an_override_given_twice_the_last_counts():
    assert load_config("smollm2-cpu", ["steps=3", "steps=4"]).steps == 4


@pytest.mark.parametrize("kind", [EvaluateConfig, PublishConfig])
@pytest.mark.parametrize("name", ["..", "", "x" * 300, "a/b"])
def test_a_run_is_named_alike_wherever_it_is_named(kind, name: str):
    with pytest.raises(BadInput, match="run: .* is no name"):
        parse_config(kind, {"run": name}, source="test")


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
        (
            ["precision=mxfp8", "mxfp8.emulation=true", "update.parallel={tensor: 2, sequence: true}"],
            r"mxfp8\.emulation does not work with update\.parallel\.sequence",
        ),
        (
            ["policy=lora", "rollout.engine={max_lora_rank: 8}"],
            r"rollout\.engine: max_lora_rank is decided by the setting lora\.rank",
        ),
        (
            ["update.parallel.data=2", "resources={rollout_gpus: 1, update_gpus: 4}"],
            r"resources\.update_gpus \(4\) must be 2: update\.parallel makes 2 process",
        ),
        (
            ["policy=lora", "lora.targets=['*.layers.1.*.linear_fc1']", "update.parallel.pipeline=2"],
            r"lora\.targets: '\*\.layers\.1\.\*\.linear_fc1' numbers layers or experts",
        ),
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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            ["update.parallel={tensor: 4, expert: 4}"],
            r"update\.parallel\.tensor 4: the 192 inputs of model\.layers\.0\.mlp\.down_proj\.weight make 4 shards of 48, "
            r"and blocks are of 32; it can be split over 1, 2, 3, 6$",
        ),
        (["update.parallel={tensor: 3, expert: 3}"], None),
        (["update.parallel.tensor=3"], r"the 64 inputs of .*experts\.0\.down_proj\.weight make 3 shards of 21\.3"),
        (["update.parallel.tensor=2"], r"the 96 outputs of model\.layers\.0\.mlp\.up_proj\.weight make 2 shards of 48"),
        (["update.parallel.tensor=2", "mxfp8.train=false"], None),
        (["rollout.tensor_parallel_size=2"], None),  # outputs are not contracted in an engine
        (
            ["rollout.tensor_parallel_size=3"],
            r"rollout\.tensor_parallel_size 3: the 64 inputs of .*experts\.0\.down_proj",
        ),
        (["rollout.tensor_parallel_size=3", "rollout.engine={enable_expert_parallel: true}"], None),
    ],
)
def test_tensor_parallelism_that_cuts_mxfp8_s_blocks_is_refused(tmp_path, sizes: list[str], message: str | None):
    import torch
    from safetensors.torch import save_file

    shapes = {
        "up_proj": (96, 64),
        "down_proj": (64, 192),
        "experts.0.up_proj": (64, 64),
        "experts.0.down_proj": (64, 64),
    }
    tensors = {f"model.layers.0.mlp.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_config("smollm2-cpu", ["precision=mxfp8", "mxfp8.emulation=true", *sizes])
    if message is None:
        config.check_model(tmp_path)
        return
    with pytest.raises(BadInput, match=message):
        config.check_model(tmp_path)


def test_a_fault_of_the_profile_names_the_profile_and_one_of_the_command_line_does_not(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("update: {lr: -1}\n")
    with pytest.raises(BadInput) as refused:
        load_config(str(path), ["steps=0"])
    assert str(refused.value).splitlines() == [
        "steps: Input should be greater than or equal to 1 (got 0)",
        "  profile mine.yaml: update.lr: Input should be greater than 0 (got -1)",
    ]


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (EvaluateConfig, ["version=1"], "run is needed: run=..."),
        (
            PublishConfig,
            ["run=r", "fused_experts=true"],
            "fused_experts is about the files of adapter_folder: name one",
        ),
        (
            TrainConfig,
            ["smollm2-cpu"],
            "override: 'smollm2-cpu' is not of the form path.to.key=value; a profile comes first",
        ),
        (TrainConfig, ["steps"], "override: 'steps' is not of the form path.to.key=value; did you mean steps=...?"),
    ],
)
def test_what_a_command_line_lacks_is_said(kind: type[Config], words: list[str], message: str):
    with pytest.raises(BadInput) as refused:
        parse_config(kind, apply_overrides({}, words))
    assert str(refused.value).startswith(message)


def test_a_setting_that_came_later_changes_no_key_and_no_identity_until_it_is_used():
    config = load_config("smollm2-cpu")
    assert "credit" not in config.identity()["reward"] and "episodes" not in config.identity()
    used = load_config("smollm2-cpu", ["reward.credit=turn"])
    assert used.identity()["reward"]["credit"] == "turn"
    assert used.reward.digest() != config.reward.digest()
    # Of a store of before: what its keys were made of.
    assert config.reward.digest() == "25a49b081d90bfe42af50e8440ceea3ef2697e9237cfbc54127710cf545a86eb"
