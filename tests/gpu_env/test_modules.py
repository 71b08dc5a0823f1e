"""A trainer of the layers that a GPU has, Transformer Engine's, built on CPU tensors: it holds, exports and stores what one of the
CPU's layers does. What the layers compute only a GPU can tell."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infra.policy.adapters import LoraConfig
from tasks.update.config import UpdateConfig
from tests.gpu_env.device import presented_to_torch
from tests.support import tiny_models

MODELS = ["dense", "experts", "beam"]
SETTINGS = UpdateConfig(precision="bfloat16", share_prompts=False, recompute=True)
TARGETS = {
    "dense": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "experts": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "beam": ("linear_qkv", "linear_gate", "linear_proj", "linear_fc1", "linear_fc2"),
}


def cpu_trainer(folder: Path, lora: LoraConfig | None = None) -> Any:
    from tasks.update.trainer import Trainer

    return Trainer(str(folder), SETTINGS, seed=1, lora=lora)


def gpu_trainer(folder: Path, lora: LoraConfig | None = None) -> Any:
    with presented_to_torch():
        return cpu_trainer(folder, lora)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return getattr(tiny_models, model)(tmp_path_factory.mktemp(model) / "model")


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Any:
    return cpu_trainer(folder)  # the first: it makes the process group, over gloo


@pytest.fixture(scope="module")
def gpu(folder: Path, cpu: Any) -> Any:
    return gpu_trainer(folder)


def kinds(trainer: Any) -> set[str]:
    return {type(module).__name__ for gpt in trainer.model.gpts for module in gpt.modules()}


def test_its_layers_are_transformer_engines(model: str, cpu: Any, gpu: Any):
    assert not any(kind.startswith("TE") for kind in kinds(cpu))
    assert {"TEDotProductAttention", "TERowParallelLinear"} <= kinds(gpu)
    assert ("TEGroupedMLP" in kinds(gpu)) == (model != "dense"), "a layer's experts are one grouped product"
    assert not {"SequentialMLP", "SegmentAttention"} & kinds(gpu)


def test_its_parameters_have_the_cpu_s_names_shapes_and_dtypes(cpu: Any, gpu: Any):
    def held(trainer: Any) -> dict[str, Any]:
        named = trainer.model.parameters() | trainer.model.buffers()
        return {
            name: (tuple(tensor.shape), tensor.dtype)
            for name, tensor in named.items()
            if not name.endswith("_extra_state")
        }

    assert held(gpu) == held(cpu)


def test_a_beams_router_stays_in_fp32(model: str, gpu: Any):
    routers = {tensor.dtype for name, tensor in gpu.model.parameters().items() if name.endswith("router.weight")}
    assert routers == {"dense": set(), "experts": {torch.bfloat16}, "beam": {torch.float32}}[model]


def test_the_bridge_gives_back_every_tensor_bit_for_bit(folder: Path, cpu: Any, gpu: Any):
    file, ours = load_file(folder / "model.safetensors"), {name: t.clone() for name, t in cpu.export()}
    exported = {name: tensor.clone() for name, tensor in gpu.export()}
    assert exported.keys() == file.keys() == ours.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == ours[name].dtype, name
        assert torch.equal(tensor, ours[name]) and torch.equal(tensor, file[name].to(tensor.dtype)), name


def moved(trainer: Any, seed: int) -> None:
    """As if trained: every value of the optimizer's state is another one."""
    generator = torch.Generator().manual_seed(seed)
    tensors, meta = trainer.state()
    changed = {
        name: torch.rand(t.shape, generator=generator).to(t.dtype) if t.is_floating_point() else t.clone()
        for name, t in tensors.items()
    }
    trainer.load_state(changed, meta)


@pytest.mark.parametrize("direction", ["GPU to CPU", "CPU to GPU"])
def test_a_checkpoint_of_one_loads_in_the_other(direction: str, cpu: Any, gpu: Any):
    source, target = (gpu, cpu) if direction == "GPU to CPU" else (cpu, gpu)
    moved(source, 1)
    moved(target, 2)
    tensors, meta = source.state()
    target.load_state({name: tensor.clone() for name, tensor in tensors.items()}, meta)
    loaded, _ = target.state()
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    exported = dict(source.export())
    assert all(torch.equal(tensor, exported[name]) for name, tensor in target.export())


def test_adapters_find_the_same_modules(model: str, folder: Path, cpu: Any):
    lora = LoraConfig(rank=4, alpha=8, targets=TARGETS[model])
    ours, theirs = cpu_trainer(folder, lora), gpu_trainer(folder, lora)
    shapes = [{name: (tuple(t.shape), t.dtype) for name, t in one.export()} for one in (theirs, ours)]
    assert shapes[0] == shapes[1]
    assert (model == "dense") or any(".experts.7." in name for name in shapes[0]), "experts have theirs"
    assert theirs.adapter_config() == ours.adapter_config()
    assert not any(p.requires_grad for n, p in theirs.model.parameters().items() if "adapter" not in n)
