"""MXFP8 on experts: a small Beam in the real Megatron trainer and the real vLLM engine, both emulating the format.

Both compute in fp32 here, so that what they differ by is what MXFP8 adds, and nothing else.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from infra.models import megatron_cpu
from infra.models.beam.checkpoint import is_router
from infra.numerics.mxfp8 import SCALE, dequantize_tensors
from infra.policy import reader, writer
from infra.policy.follow import follow
from infra.storage.artifacts import ArtifactRef
from infra.storage.schemas import ROUTES
from infra.storage.store import Store
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tests.bench import mismatch
from tests.integration.test_mxfp8 import MXFP8, PROBE, difference, error_bound, make_trainer
from tests.support import tiny_models

megatron_cpu.install()  # before vLLM is imported: trainer and engine share a process here, as they never do in a run
LAYER, EXPERT = 1, 5
LOGPROBS_APART = 1e-5
"""Nats, in the mean over tokens: what trainer and engine may differ by (fp32 sums in another order)."""


class Loop:
    """A trainer and an engine that is brought to the trainer's first two versions through the store."""

    def __init__(self, root: Path):
        self.folder = tiny_models.beam(root / "beam")
        self.store = Store.at(f"file://{root}/store")
        self.plain = make_trainer(self.folder, mxfp8=None)
        self.trainer = make_trainer(self.folder)
        settings = RolloutConfig(max_model_len=128, kv_cache_gib=0.05, max_new_tokens=12, dtype="float32")
        self.engine = RolloutEngine(str(self.folder), settings, mxfp8=MXFP8)
        self.versions: list[ArtifactRef] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        """The trainer's own, in high precision, of each version."""
        self.logprobs: list[dict[str, list[list[float]]]] = []
        """Of the probe, at each version."""
        self.publish()
        self.batch: pa.Table = mismatch.scored(self.engine, samples=2)
        self.figures = self.trainer.update(self.batch)
        self.publish()

    def publish(self) -> None:
        number = len(self.versions)
        self.weights.append({name: tensor.clone() for name, tensor in self.trainer.model.export()})
        tensors = self.trainer.export()
        self.versions.append(writer.write_full(self.store, f"v{number}", tensors, version=number, step=number))
        follow(self.engine, self.versions[-1])
        engine, trainer = self.engine.token_logprobs(PROBE), self.trainer.token_logprobs(PROBE)
        self.logprobs.append({"engine": engine, "trainer": trainer})


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    # Never closed: closing vLLM would take the process groups that Megatron has in this process.
    return Loop(tmp_path_factory.mktemp("loop"))


def test_versions_hold_the_experts_elements_and_scales_bit_for_bit(loop: Loop):
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    for ref, weights in zip(loop.versions, loop.weights, strict=True):
        version = dict(reader.read(ref))
        experts = [name for name in weights if ".experts." in name]
        assert len(experts) == 3 * 16 * 3, "three layers of 16 experts of three matrices"
        for name in experts:
            elements, scales = _mxfp8_e4m3_quantize_torch(weights[name])
            assert torch.equal(version[name].view(torch.uint8), elements.view(torch.uint8)), name
            assert torch.equal(version[name + SCALE], scales), name
        assert not [name for name in version if is_router(name) and version[name].dtype != torch.float32]
    changed = [name for name in loop.weights[0] if not torch.equal(loop.weights[0][name], loop.weights[1][name])]
    assert len(changed) > 100, "the second version is another one"


def test_the_engine_holds_the_numbers_of_the_version(loop: Loop):
    held = dict(loop.engine.export())
    numbers = dict(dequantize_tensors(reader.read(loop.versions[-1])))
    assert held.keys() == numbers.keys()
    for name, tensor in numbers.items():
        assert torch.equal(held[name], tensor), name


@pytest.mark.parametrize("version", [0, 1])
def test_logprobs_of_trainer_and_engine_agree(loop: Loop, version: int):
    found = loop.logprobs[version]
    assert difference(found["engine"], found["trainer"]).mean() < LOGPROBS_APART
    if version == 0:
        assert difference(found["engine"], loop.plain.token_logprobs(PROBE)).mean() > 0.01, "it is MXFP8"


def test_k3_is_that_of_rounding_with_and_without_replay(loop: Loop):
    assert loop.figures["updated"] == 1 and set(ROUTES) <= set(loop.batch.column_names)
    assert loop.figures["k3_mean"] < 1e-9 and loop.figures["logprob_diff_max"] < 1e-4
    own_routes = make_trainer(loop.folder, replay="off").update(loop.batch)
    assert own_routes["k3_mean"] < 1e-9, "the router sees the same numbers"


def test_mxfp8_rollouts_of_a_high_precision_trainer_differ_and_replay_closes_part_of_it(loop: Loop):
    train_only = MXFP8.model_copy(update={"train": False})
    k3 = {r: make_trainer(loop.folder, train_only, replay=r).update(loop.batch)["k3_mean"] for r in ("rollout", "off")}
    assert 1e-5 < k3["rollout"] < 5e-3
    assert k3["rollout"] < k3["off"]


def test_an_expert_s_products_stay_within_the_format_s_bound(loop: Loop):
    """Forward and both backward products of one expert's two layers; and the engine's forward is the trainer's."""
    generator = torch.Generator().manual_seed(0)
    expert = loop.trainer.model.gpts[0].decoder.layers[LAYER].mlp.experts.local_experts[EXPERT]
    for linear, held in ((expert.linear_fc1, "w13_weight"), (expert.linear_fc2, "w2_weight")):
        outputs, inputs = linear.weight.shape
        x = torch.randn(75, inputs, generator=generator).requires_grad_()  # tokens: no multiple of 32
        dy = torch.randn(75, outputs, generator=generator)
        y = linear(x)[0]
        dx, dw = torch.autograd.grad(y, [x, linear.weight], dy)
        x_, w_, dy_ = x.detach().double(), linear.weight.detach().double(), dy.double()
        for found, left, right in ((y, x_, w_.t()), (dx, dy_, w_), (dw, dy_.t(), x_)):
            e_left, e_right = error_bound(left.float(), 1).double(), error_bound(right.float(), 0).double()
            bound = left.abs() @ e_right + e_left @ right.abs() + e_left @ e_right
            error = (found.detach().double() - left @ right).abs()
            assert (error <= bound + 1e-5).all() and error.max() > 1e-3
        (served,) = loop.engine._llm.collective_rpc(product, args=(held, x.detach()))
        torch.testing.assert_close(served, y.detach(), rtol=1e-5, atol=1e-5)


def product(worker: Any, held: str, x: torch.Tensor) -> torch.Tensor:
    """Inside vLLM: what the expert's kernel makes of x [T, I] with one of its weights."""
    from tasks.rollout.weights.slots import experts

    module = next(module for name, module in experts(worker.model_runner.model) if f".layers.{LAYER}." in name)
    weight = getattr(module, held)
    counts = [0] + [len(x) if expert == EXPERT else 0 for expert in range(len(weight))]
    return module.quant_method.moe_kernel.fused_experts._grouped(x, weight, counts, None, None)
