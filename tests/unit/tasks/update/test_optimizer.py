"""AdamW over masters: the textbook's step, in fp32 whatever the model's dtype."""

import pytest
import torch

from tasks.update.config import UpdateConfig
from tasks.update.optimizer import MasterAdamW


def parameter(value: float, dtype=torch.float32, shape=(1,)) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, value, dtype=dtype))


def backward(p: torch.nn.Parameter, gradient: float) -> None:
    (p * gradient).sum().backward()


def test_first_step_moves_by_the_learning_rate_against_the_gradient():
    p = parameter(1.0)
    optimizer = MasterAdamW([("p", p)], UpdateConfig(lr=0.1, max_grad_norm=100))
    backward(p, 5.0)
    optimizer.step(0.1, optimizer.grad_norm())
    assert p.item() == pytest.approx(1.0 - 0.1)  # m / sqrt(v) = sign of the gradient


def test_decay_is_for_matrices_only():
    matrix, bias = parameter(1.0, shape=(2, 2)), parameter(1.0)
    optimizer = MasterAdamW([("matrix", matrix), ("bias", bias)], UpdateConfig(lr=0.1, weight_decay=0.5))
    backward(matrix, 0.0)
    backward(bias, 0.0)
    optimizer.step(0.1, optimizer.grad_norm())
    assert matrix[0, 0].item() == pytest.approx(1 - 0.1 * 0.5)
    assert bias.item() == 1.0


def test_gradients_are_clipped_by_their_global_norm():
    a, b = parameter(0.0), parameter(0.0)
    optimizer = MasterAdamW([("a", a), ("b", b)], UpdateConfig(max_grad_norm=1.0))
    backward(a, 3.0)
    backward(b, 4.0)
    assert optimizer.grad_norm() == pytest.approx(5.0)
    optimizer.step(1e-3, optimizer.grad_norm())
    assert (a.grad.item(), b.grad.item()) == (pytest.approx(0.6), pytest.approx(0.8))


def test_warmup_is_linear_and_then_constant():
    optimizer = MasterAdamW([("p", parameter(0.0))], UpdateConfig(lr=4e-5, lr_warmup_steps=4))
    assert [optimizer.lr(step) for step in range(6)] == pytest.approx([1e-5, 2e-5, 3e-5, 4e-5, 4e-5, 4e-5])


def test_bf16_weights_learn_from_steps_smaller_than_their_spacing():
    p = parameter(1.0, torch.bfloat16)  # neighbours of 1.0 are 0.4% and 0.8% away
    optimizer = MasterAdamW([("p", p)], UpdateConfig(lr=1e-3))
    for _ in range(8):
        backward(p, 1.0)
        optimizer.step(1e-3, optimizer.grad_norm())
        optimizer.zero_grad()
    assert optimizer.masters["p"].item() == pytest.approx(1 - 8e-3, rel=1e-4)
    assert p.item() == torch.tensor(1 - 8e-3).bfloat16().item()


def test_bf16_weights_in_an_fp32_parameter_are_rounded_and_their_gradients_are_not():
    p = parameter(1.001)
    optimizer = MasterAdamW([("p", p)], UpdateConfig(lr=1e-3), {"p": torch.bfloat16})
    assert (p.item(), optimizer.masters["p"].item()) == (1.0, pytest.approx(1.001))
    backward(p, 1 / 3)
    backward(p, 1 / 3)
    assert optimizer.grad_norm() == pytest.approx(2 / 3, rel=1e-6)
    optimizer.step(1e-3, optimizer.grad_norm())
    assert (p.item(), optimizer.masters["p"].item()) == (1.0, pytest.approx(1.0, abs=1e-6))


def test_bf16_gradients_of_microbatches_are_summed_in_fp32():
    p = parameter(0.0, torch.bfloat16)
    optimizer = MasterAdamW([("p", p)], UpdateConfig())
    for gradient in (256.0, 1.0, 1.0):  # bf16 would lose the ones
        backward(p, gradient)
    assert optimizer.grad_norm() == 258.0


def test_a_state_of_another_model_changes_nothing():
    optimizer = MasterAdamW([("p", parameter(1.0))], UpdateConfig())
    other = MasterAdamW([("p", parameter(2.0, shape=(3,)))], UpdateConfig())
    with pytest.raises(RuntimeError, match=r"master\.p is torch.float32 \(3,\)"):
        optimizer.load_state(other.state())
    assert optimizer.masters["p"].item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_state_gives_the_same_weights_bit_for_bit(dtype):
    results = []
    for offload in (False, True):
        p = parameter(1.25, dtype, (3, 3))
        optimizer = MasterAdamW([("p", p)], UpdateConfig(lr=1e-2, weight_decay=0.1, offload_optimizer=offload))
        for gradient in (1.0, -0.3, 0.7):
            backward(p, gradient)
            optimizer.step(1e-2, optimizer.grad_norm())
            optimizer.zero_grad()
        assert (optimizer.masters["p"] is p) == (not offload and dtype == torch.float32)
        results.append((p.detach().clone(), optimizer.state()))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


@pytest.mark.parametrize("loaded", [False, True], ids=["new", "after load_state"])
def test_an_offloaded_state_lies_in_the_host_s_memory_and_shares_none_with_the_weights(loaded: bool):
    """Both are the host's here, so that what tells them apart is their memory."""
    p = parameter(1.25, shape=(3, 3))
    optimizer = MasterAdamW([("p", p)], UpdateConfig(lr=1e-2, offload_optimizer=True))
    if loaded:
        other = MasterAdamW([("p", parameter(0.5, shape=(3, 3)))], UpdateConfig())
        optimizer.load_state({name: tensor.clone() for name, tensor in other.state().items()})
        assert (p == 0.5).all()
    memories = {}
    for gradient in (1.0, -0.3):
        backward(p, gradient)
        optimizer.step(1e-2, optimizer.grad_norm())
        state = optimizer.state()
        assert set(state) == {"master.p", "exp_avg.p", "exp_avg_sq.p", "step.p"}
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        memories = {name: tensor.untyped_storage().data_ptr() for name, tensor in state.items()}
        of_weights = {p.untyped_storage().data_ptr(), p.grad.untyped_storage().data_ptr()}
        assert len(set(memories.values())) == 4 and not of_weights & set(memories.values())
        assert torch.equal(state["master.p"], p), "and the weights are rounded from it"
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]), ("cosine", [0.5, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1])],
)
def test_the_learning_rate_goes_down_after_its_warm_up_and_stays(schedule: str, expected: list[float]):
    config = UpdateConfig(lr=1.0, lr_warmup_steps=2, lr_schedule=schedule, lr_decay_steps=4, lr_end=0.1)
    optimizer = MasterAdamW([("p", parameter(0.0))], config)
    assert [optimizer.lr(step) for step in range(7)] == pytest.approx(expected, abs=1e-3)
