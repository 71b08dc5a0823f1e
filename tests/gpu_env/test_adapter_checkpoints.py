"""An adapter of Transformer Engine's layers, whose experts are one module, and of the CPU's, which are modules of their own:
the same optimizer state, so that a checkpoint of one loads in the other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from infra.policy.adapters import LoraConfig
from tasks.update.config import UpdateConfig
from tests.gpu_env.device import presented_to_torch
from tests.support import tiny_models

ATTENTION = ("linear_qkv", "linear_proj")
MLP = ("linear_fc1", "linear_fc2")
MODELS = {"dense": ATTENTION + MLP, "experts": ATTENTION + MLP, "beam": (*ATTENTION, *MLP, "linear_gate")}
SETTINGS = UpdateConfig(precision="bfloat16", share_prompts=False)


@pytest.fixture(scope="module", params=MODELS)
def trainers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(of the CPU's layers, of the GPU's)"""
    from tasks.update.trainer import Trainer

    folder: Path = getattr(tiny_models, request.param)(tmp_path_factory.mktemp(request.param) / "model")
    lora = LoraConfig(rank=4, alpha=8, targets=MODELS[request.param])
    cpu = Trainer(str(folder), SETTINGS, seed=1, lora=lora)
    with presented_to_torch():
        return cpu, Trainer(str(folder), SETTINGS, seed=1, lora=lora)


def moved(trainer: Any, seed: int) -> dict[str, torch.Tensor]:
    """Every value of the optimizer's state another one, as if trained: its tensors, copied."""
    generator = torch.Generator().manual_seed(seed)
    tensors, meta = trainer.state()
    changed = {
        n: torch.rand(t.shape, generator=generator).to(t.dtype) if t.is_floating_point() else t.clone()
        for n, t in tensors.items()
    }
    steps = torch.tensor(float(seed))  # Adam's, one for all that are stepped together
    trainer.load_state(changed | {name: steps for name in changed if name.startswith("step.")}, meta)
    return {name: tensor.clone() for name, tensor in trainer.state()[0].items()}


def test_the_state_has_the_same_keys_shapes_and_dtypes(trainers: tuple[Any, Any]):
    cpu, gpu = ({name: (tuple(t.shape), t.dtype) for name, t in one.state()[0].items()} for one in trainers)
    assert cpu == gpu


def test_weight_decay_is_for_the_same_parts(trainers: tuple[Any, Any]):
    """Matrices and, of grouped experts, stacks of them."""
    numbers = [
        [sum(p.numel() for p in group["params"]) for group in one.optimizer.adam.param_groups] for one in trainers
    ]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("direction", ["CPU to GPU", "GPU to CPU"])
def test_a_checkpoint_of_one_loads_in_the_other(direction: str, trainers: tuple[Any, Any]):
    source, target = trainers if direction == "CPU to GPU" else trainers[::-1]
    tensors, before = moved(source, 1), moved(target, 2)
    target.load_state(tensors, source.state()[1])
    loaded = target.state()[0]
    assert loaded.keys() == tensors.keys() == before.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    theirs = dict(target.export())
    for name, tensor in source.export():
        assert torch.equal(theirs[name], tensor), name
