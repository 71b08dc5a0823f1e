"""What an adapter or MXFP8 cannot be is told by a shell's `python -m flows train` in one line, before anything starts."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import __main__ as shell
from flows import session as sessions
from flows import train
from flows.settings import load_config
from infra.engines import capacity, engine
from infra.models.catalog import fingerprint
from infra.runs.run import Run
from tests.support import tiny_models

MXFP8 = ("precision=mxfp8", "mxfp8.emulation=true")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """dense (matrices divisible by 32) or experts (of 48), each made once."""
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = getattr(tiny_models, kind)(tmp_path_factory.mktemp(kind))
        return made[kind]

    return model


class Shell:
    """`python -m flows train` in this process, where nothing may start but what a test allows."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.store, self.patch = root / "store", monkeypatch
        monkeypatch.setenv("POLICYFLOW_HOME", str(root))
        monkeypatch.setenv("PREFECT_HOME", str(root / "prefect"))
        monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")  # no server of others' is to be ended
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(shell.signal, "signal", lambda *_: None)
        monkeypatch.setattr(train, "train", train.train.fn)
        for module, name in (
            (engine, "start_ray"),
            (engine.Engine, "_actor"),
            (capacity, "start_ray"),
            (sessions, "Tracker"),
            (train, "run_dataset"),
        ):
            monkeypatch.setattr(module, name, self.started(name))

    def started(self, name: str) -> Any:
        return lambda *_, **__: pytest.fail(f"{name} was called")

    def train(self, model: Path, *settings: str) -> int:
        words = ["flows", "train", "smollm2-cpu", f"model={model}", f"store={self.store}", "run=r", *settings]
        self.patch.setattr("sys.argv", words)
        return shell.main()

    def claimed(self) -> bool:
        return Run(store=f"file://{self.store}", name="r").read_json("run.json") is not None


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        # rank
        ("dense", ["policy=lora", "lora.rank=513"], "lora.rank: Input should be less than or equal to 512 (got 513)"),
        ("dense", ["policy=lora", "lora.rank=0"], "lora.rank: Input should be greater than or equal to 1 (got 0)"),
        (
            "dense",
            ["policy=lora", "lora.rank=64", "rollout.engine={max_lora_rank: 8}"],
            "rollout.engine: max_lora_rank is decided by the setting lora.rank",
        ),
        (
            "experts",
            ["policy=lora", "lora.rank=48", "precision=mxfp8", "resources.rollout_gpus=1", "resources.update_gpus=1"],
            "lora.rank 48: in MXFP8 on GPUs Megatron-Bridge multiplies experts' adapters",
        ),
        # targets
        (
            "dense",
            ["policy=lora", "lora.targets=[linear_qkv, q_proj]"],
            "lora.targets: 'q_proj' matches no module of the model; it has linear_fc1, linear_fc2, linear_proj, linear_qkv",
        ),
        ("dense", ["policy=lora", "lora.targets=[linear_gate]"], "lora.targets: 'linear_gate' matches no module"),
        ("dense", ["policy=lora", "lora.targets=['*.layers.7.*']"], "lora.targets: '*.layers.7.*' matches no module"),
        ("dense", ["policy=lora", "lora.targets=['*.experts.*']"], "lora.targets: '*.experts.*' matches no module"),
        (
            "dense",
            ["policy=lora", "lora.targets=['*.layers.1.*']"],
            "lora.targets: '*.layers.1.*' matches modules that cannot have an adapter, too; end it in one of linear_fc1, ",
        ),
        (
            "experts",
            ["policy=lora", "lora.targets=['*.experts.*']"],
            "lora.targets: '*.experts.*' matches modules that",
        ),
        ("dense", ["policy=lora", "lora.targets=['*']"], "lora.targets: '*' matches modules that cannot"),
        # blocks of 32
        (
            "experts",
            [*MXFP8],
            "model.layers.0.mlp.experts.0.down_proj.weight is [64, 48], and both dimensions must be divisible by 32; add "
            '"model.layers.0.mlp.experts.0.down_proj" to mxfp8.high_precision',
        ),
        ("experts", [*MXFP8, "mxfp8.train=false"], "experts.0.down_proj.weight is [64, 48], and both dimensions"),
        (
            "dense",
            [*MXFP8, "update.parallel.tensor=2"],
            "update.parallel.tensor 2: the 96 inputs of model.layers.0.mlp.down_proj.weight make 2 shards of 48",
        ),
        ("dense", [*MXFP8, "mxfp8.high_precision=['*.layers.9.*']"], "'*.layers.9.*' matches no module of the model"),
        ("dense", [*MXFP8, "mxfp8.high_precision=['*']"], "nothing is left to quantise"),
        (
            "dense",
            [*MXFP8, "mxfp8.high_precision=['*.layers.0.*']"],
            "mxfp8.high_precision: it replaces the default, and model.embed_tokens is none of the linear layers and experts that "
            'can be in MXFP8; add "*embed_tokens"',
        ),
        ("dense", [*MXFP8, "mxfp8.sequence_multiple=48"], "mxfp8.sequence_multiple: Input should be a multiple of 32"),
        # layouts; the rest of them: tests/unit/infra/models/test_layout.py
        (
            "dense",
            ["rollout.tensor_parallel_size=3"],
            "rollout.tensor_parallel_size 3: it must divide the model's num_attention_heads (4); 2 does",
        ),
        (
            "dense",
            ["rollout.engine={enable_expert_parallel: true}"],
            "rollout.engine: enable_expert_parallel spreads a layer's experts, and the model has none: leave it out",
        ),
        (
            "experts",
            ["update.parallel.tensor=2"],
            "update.parallel.tensor 2: Megatron trains a mixture of experts over tensor-parallel processes with sequence",
        ),
        ("dense", ["update.parallel.pipeline=2"], "update.parallel.pipeline 2: the model ties its embeddings"),
        (
            "dense",
            ["update.parallel.tensor=4"],
            "update.parallel.tensor 4: it must divide the model's vocab_size (258)",
        ),
        (
            "experts",
            ["rollout.pipeline_parallel_size=2"],
            "rollout.pipeline_parallel_size 2: vLLM records no routed experts over pipeline stages",
        ),
        # devices
        (
            "dense",
            ["precision=mxfp8"],
            "precision mxfp8: engines without GPUs have no MXFP8 units; set mxfp8.emulation to true",
        ),
        ("dense", ["precision=mxfp8", "policy=lora"], "precision mxfp8: engines without GPUs have no MXFP8 units"),
        (
            "dense",
            ["precision=mxfp8", "resources.rollout_gpus=1"],
            "precision mxfp8: engines without GPUs have no MXFP8 units",
        ),
        ("dense", ["policy=lora", "lora.experts=shared_outer"], "lora.experts shared_outer needs Megatron's grouped"),
        ("dense", ["policy=lora", "lora.tuned_configs=/nowhere"], "lora.tuned_configs: /nowhere is no folder"),
    ],
)
def test_a_start_is_refused_before_anything_runs(
    cli: Shell, models: Callable[[str], Path], capsys, kind: str, settings: list[str], message: str
):
    model = models(kind)
    capsys.readouterr()  # what making it prints
    assert cli.train(model, *settings) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and message in told and "Traceback" not in told
    assert not cli.claimed(), "the run's name stays free for a start that is right"


def test_a_rank_above_that_of_the_run_s_engines_is_refused(cli: Shell, models: Callable[[str], Path], capsys):
    model = models("dense")
    begun = load_config("smollm2-cpu", [f"model={model}", "policy=lora", "lora.rank=8"])
    Run(store=f"file://{cli.store}", name="r").open(begun.identity() | {"model_fingerprint": fingerprint(model)})
    assert cli.train(model, "policy=lora", "lora.rank=64") == 2
    assert "lora.rank: the run has 8, this start asks for 64" in capsys.readouterr().err


def test_mxfp8_units_on_gpus_that_are_not_there_are_refused(cli: Shell, models: Callable[[str], Path], capsys):
    import ray

    node = {"NodeManagerAddress": "here", "Alive": True, "Resources": {"CPU": 2.0, "memory": 2.0**30}}
    cli.patch.setattr(capacity, "start_ray", lambda: None)
    cli.patch.setattr(capacity, "stop_ray", lambda: None)
    cli.patch.setattr(ray, "nodes", lambda: [node])
    cli.patch.setattr(sessions, "Tracker", lambda *_, **__: SimpleNamespace(finish=lambda status: []))
    gpus = ("resources.rollout_gpus=1", "resources.update_gpus=1")
    assert cli.train(models("dense"), "precision=mxfp8", *gpus) == 2
    assert "this machine has 0 GPUs" in capsys.readouterr().err
    assert not cli.claimed()
