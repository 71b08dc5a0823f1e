"""Megatron's update with TransformerEngine's layers: the policy is transformers', and a step moves it the right way."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.device import DEVICE, ON_CPU
from tests.gpu.trainers import apart, bf16, logprobs, probed, reference, trainer
from tests.integration.beam.test_trainer import scored as with_routes
from tests.integration.test_trainer import scored
from tests.support import tiny_models

NEAR = 0.1
"""Of the distance to another random model: what bf16 may move logprobs by."""
KINDS = ["dense", "beam"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bf16(getattr(tiny_models, kind), tmp_path_factory.mktemp(kind))


def batch(kind: str, seed: int = 0) -> pa.Table:
    """Beam's with routes, which are replayed."""
    return scored(seed) if kind == "dense" else with_routes(seed)


def test_layers_are_transformer_engine_s_and_lie_on_the_device(folder: Path):
    made = trainer(folder)
    assert {parameter.device.type for parameter in made.model.parameters().values()} == {DEVICE.type}
    kinds = {type(module).__name__ for module in made.model.gpts[0].modules()}
    te = {"TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"}
    assert bool(kinds & te) != ON_CPU and ("TEDotProductAttention" in kinds) != ON_CPU


def test_logprobs_are_transformers(kind: str, folder: Path, tmp_path: Path):
    expected = logprobs(reference(folder))
    other = logprobs(reference(bf16(getattr(tiny_models, kind), tmp_path, seed=1)))
    assert apart(probed(trainer(folder)), expected) < NEAR * apart(other, expected)


def test_export_gives_back_the_checkpoint_bit_for_bit(folder: Path):
    exported = {name: tensor.cpu().float() for name, tensor in trainer(folder).export()}
    source = load_file(folder / "model.safetensors")
    assert exported.keys() == source.keys()
    assert not [name for name, tensor in source.items() if not torch.equal(exported[name], tensor)]


def test_a_step_is_finite_and_moves_every_kind_of_weight(kind: str, folder: Path):
    made = trainer(folder, lr=0.02)  # a norm of 1 in bf16 does not see less
    before = {name: tensor.clone() for name, tensor in made.export()}
    metrics = made.update(batch(kind))
    assert metrics["updated"] == 1 and all(map(math.isfinite, metrics.values())) and metrics["grad_norm"] > 0
    moved = {
        name.rpartition(".layers.")[2].partition(".")[2] or name
        for name, t in made.export()
        if not torch.equal(t, before[name])
    }
    still = {name.rpartition(".layers.")[2].partition(".")[2] or name for name in before} - moved
    assert not [name for name in still if not name.endswith("e_score_correction_bias") and ".experts." not in name]


def test_good_answers_become_likelier_and_bad_ones_less(folder: Path):
    good, bad = [5, 6, 7, 8], [5, 9, 9, 9]
    made = trainer(folder)

    def likely() -> list[float]:
        return [sum(of[1:]) for of in made.token_logprobs([good, bad])]

    before = likely()
    for _ in range(3):
        rows: list[dict[str, Any]] = [
            {
                "prompt_ids": ids[:2],
                "response_ids": ids[2:],
                "logprobs": of[1:],
                "loss_mask": [True] * 2,
                "advantage": a,
            }
            for ids, of, a in zip((good, bad), made.token_logprobs([good, bad]), (1.0, -1.0), strict=True)
        ]
        assert made.update(pa.Table.from_pylist(rows))["k3_mean"] < 0.01, "the logprobs are its own"
    after = likely()
    assert after[0] > before[0] and after[1] < before[1]


@pytest.mark.parametrize("settings", [{"recompute": True}, {"microbatch_tokens": 1}], ids=["recomputed", "one by one"])
def test_the_gradient_does_not_depend_on_how_it_is_computed(kind: str, folder: Path, settings: dict[str, Any]):
    plain, other = trainer(folder).update(batch(kind)), trainer(folder, **settings).update(batch(kind))
    for name in ("loss", "grad_norm", "entropy"):
        assert other[name] == pytest.approx(plain[name], rel=0.02, abs=1e-3), name


def test_a_checkpoint_is_enough_to_go_on(kind: str, folder: Path):
    made, other = trainer(folder), trainer(folder)
    made.update(batch(kind))
    tensors, meta = made.state()
    other.load_state({name: tensor.cpu().clone() for name, tensor in tensors.items()}, meta)
    assert apart(probed(other), probed(made)) < 1e-3
    assert other.update(batch(kind, 1))["loss"] == pytest.approx(
        made.update(batch(kind, 1))["loss"], rel=0.02, abs=1e-3
    )
