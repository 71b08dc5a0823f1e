"""`update.offload_optimizer`: masters and moments on the host, weights on the device, and the same steps."""

from pathlib import Path

import pytest
import torch

from tests.gpu.device import DEVICE
from tests.gpu.trainers import apart, bf16, probed, trainer
from tests.integration.test_trainer import scored
from tests.support import tiny_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bf16(tiny_models.dense, tmp_path_factory.mktemp("dense"))


def test_the_state_lies_on_the_host_and_the_weights_on_the_device(folder: Path):
    made = trainer(folder, offload_optimizer=True)
    made.update(scored())
    state = [made.optimizer.masters, *made.optimizer.adam.state.values()]
    assert {tensor.device.type for tensors in state for tensor in tensors.values()} == {"cpu"}
    assert {parameter.device.type for parameter in made.model.parameters().values()} == {DEVICE.type}
    for name, master in made.optimizer.masters.items():
        weight = made.model.parameters()[name]
        assert torch.equal(weight.cpu(), master.detach().to(made.optimizer._weights[name]).to(weight.dtype)), name


def test_it_trains_as_one_that_is_not_offloaded(folder: Path):
    """But for what AdamW's two fused kernels, the host's and the device's, round differently."""
    start = probed(trainer(folder))
    plain, offloaded = trainer(folder), trainer(folder, offload_optimizer=True)
    for seed in range(3):
        expected, found = plain.update(scored(seed)), offloaded.update(scored(seed))
        assert found["loss"] == pytest.approx(expected["loss"], rel=0.02, abs=1e-3)
    assert apart(probed(plain), start) > 0.01
    assert apart(probed(offloaded), probed(plain)) < 0.05 * apart(probed(plain), start)
    for name, master in plain.optimizer.masters.items():
        moved = (master.cpu() - offloaded.optimizer.masters[name]).abs()
        assert (moved > 3e-3).float().mean() < 0.01, (
            name
        )  # three steps of 1e-3 at most, where a sign of a gradient is rounding


def test_a_checkpoint_of_either_goes_on_in_the_other(folder: Path):
    plain, offloaded = trainer(folder), trainer(folder, offload_optimizer=True)
    plain.update(scored())
    tensors, meta = plain.state()
    offloaded.load_state({name: tensor.clone() for name, tensor in tensors.items()}, meta)
    assert apart(probed(offloaded), probed(plain)) < 1e-3
    assert {master.device.type for master in offloaded.optimizer.masters.values()} == {"cpu"}
