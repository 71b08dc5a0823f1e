"""MXFP8: rounding bit for bit as vLLM's, a layer's three products within the format's bound, and trainer and engine alike."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from infra.errors import BadInput
from infra.models import megatron_cpu
from infra.numerics.mxfp8 import Mxfp8Config, dequantize, quantize, rounded, scale_exponents
from infra.policy.follow import follow
from infra.policy.version import describe, digest_tensors
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tasks.update.config import UpdateConfig
from tests.integration.test_trainer import scored
from tests.support import tiny_models
from tests.support.tensor_engine import TensorTrainer

megatron_cpu.install()  # before vLLM is imported: trainer and engine share a process here, as they never do in a run
MXFP8 = Mxfp8Config(emulation=True)
PROBE = [[5, 9, 200, 33, 17] * 9, [7, 8, 3]]


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_quantization_is_vllm_s_bit_for_bit(scale: float):
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator) * torch.exp(3 * torch.randn(64, 256, generator=generator)) * scale
    x[0] = 0
    for tensor in (x, x.bfloat16()):
        elements, scales = quantize(tensor)
        expected_elements, expected_scales = _mxfp8_e4m3_quantize_torch(tensor)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(elements.view(torch.uint8), expected_elements.view(torch.uint8))
        assert torch.equal(rounded(tensor).float(), dequantize(elements, scales).to(tensor.dtype).float())


def test_a_number_that_is_none_does_not_become_one():
    x = torch.randn(3, 64)
    x[1, 40] = torch.nan
    assert rounded(x)[1, 40].isnan() and rounded(x)[[0, 2]].isfinite().all()


def error_bound(x: torch.Tensor, dim: int) -> torch.Tensor:
    """What rounding may change an element by: half a unit of 3 bits, or of the smallest subnormal times the scale."""
    moved = x.movedim(dim, -1)
    padded = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % 32))
    smallest = torch.exp2(scale_exponents(padded).float() - 10).repeat_interleave(32, -1)[..., : moved.shape[-1]]
    return torch.maximum(moved.abs() / 16, smallest).movedim(-1, dim)


def test_a_layer_s_three_products_stay_within_the_format_s_bound():
    from tasks.update.mxfp8 import Mxfp8Products, RoundedWeight

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(75, 96, generator=generator).requires_grad_()  # tokens: no multiple of 32
    w = (torch.randn(64, 96, generator=generator) / 10).requires_grad_()
    dy = torch.randn(75, 64, generator=generator)
    y = Mxfp8Products.apply(x, w, RoundedWeight().of(w), None)
    y.backward(dy)
    x_, w_ = x.detach().double(), w.detach().double()
    for found, left, right, contracted in (
        (y.detach(), x_, w_.t(), (1, 0)),
        (x.grad, dy.double(), w_, (1, 0)),
        (w.grad, dy.double().t(), x_, (1, 0)),
    ):
        e_left, e_right = error_bound(left.float(), contracted[0]), error_bound(right.float(), contracted[1])
        bound = left.abs() @ e_right.double() + e_left.double() @ right.abs() + e_left.double() @ e_right.double()
        error = (found.double() - left @ right).abs()
        assert (error <= bound + 1e-6).all()
        assert error.max() > 1e-3, "it is rounded"
        assert error.square().mean().sqrt() < 0.06 * (left @ right).square().mean().sqrt()


def test_a_changed_weight_is_rounded_anew():
    from tasks.update.mxfp8 import RoundedWeight

    weight, weights = torch.randn(32, 32), RoundedWeight()
    first = weights.of(weight).along_inputs
    assert weights.of(weight).along_inputs is first
    weight.mul_(1.3)
    assert torch.equal(weights.of(weight).along_inputs, rounded(weight))
    weight.data.copy_(torch.ones(32, 32))  # torch does not count this
    weights.forget()
    assert torch.equal(weights.of(weight).along_outputs, torch.ones(32, 32))


def make_trainer(folder: Path, mxfp8: Mxfp8Config | None = MXFP8, **settings: Any) -> Any:
    from tasks.update.trainer import Trainer

    config = UpdateConfig(**{"precision": "float32", "weights": "float32", "lr": 1e-3} | settings)
    return Trainer(str(folder), config, seed=1, mxfp8=mxfp8)


class Pair:
    """Trainers and an engine of one model, in MXFP8."""

    def __init__(self, kind: str, folder: Path):
        self.folder = getattr(tiny_models, kind)(folder)
        self.trainer = make_trainer(self.folder)
        settings = RolloutConfig(kv_cache_gib=0.05, max_new_tokens=8, dtype="float32")
        self.engine = RolloutEngine(str(self.folder), settings, mxfp8=MXFP8)


@pytest.fixture(scope="module", params=["dense"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    # Never closed: closing vLLM would take the process groups that Megatron has in this process.
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def difference(ours: list[list[float]], theirs: list[list[float]]) -> np.ndarray:
    return np.abs(np.concatenate(ours) - np.concatenate(theirs))


def test_trainer_and_engine_compute_the_same_after_every_version(pair: Pair):
    plain = make_trainer(pair.folder, mxfp8=None)
    for step in range(2):
        version = {name: tensor.clone() for name, tensor in pair.trainer.export()}
        pair.engine.apply(version.items(), f"v{step}")
        served, trained = pair.engine.token_logprobs(PROBE), pair.trainer.token_logprobs(PROBE)
        apart = difference(served, plain.token_logprobs(PROBE)).mean()
        # An activation next to a rounding boundary may fall to either side: equal in the mean, not in the last bit.
        assert difference(served, trained).mean() < 0.02 * apart, f"step {step}: MXFP8 itself is {apart} away from fp32"
        pair.trainer.update(scored(step))
        plain.update(scored(step))


def test_an_engine_follows_by_what_changed_and_holds_what_whole_versions_give(pair: Pair, tmp_path: Path):
    run, refs = Run(store=f"file://{tmp_path}", name="r"), list[ArtifactRef]()
    trainer, served = make_trainer(pair.folder), list[list[list[float]]]()
    source = TensorTrainer({})
    for step in range(3):
        source.tensors = {name: tensor.clone() for name, tensor in trainer.export()}
        refs.append(commit(source, run.stage("policy", step, []), SyncConfig(), refs[-1] if refs else None))
        pair.engine.apply(source.export(), f"v{step}")
        served.append(pair.engine.token_logprobs(PROBE))
        trainer.update(scored(step))
    assert served[0] != served[1] != served[2]

    follow(pair.engine, refs[0])
    sink: Any = pair.engine._sink
    with mock.patch.object(pair.engine, "prepare_whole", side_effect=AssertionError("only changes may come")):
        follow(pair.engine, refs[1])
        assert pair.engine.token_logprobs(PROBE) == served[1]
        with mock.patch.object(sink._sink, "commit", side_effect=RuntimeError("a kernel")), pytest.raises(RuntimeError):
            follow(pair.engine, refs[2])
        assert pair.engine.version == describe(refs[1]).policy_digest
        assert pair.engine.token_logprobs(PROBE) == served[1]
        follow(pair.engine, refs[2])
    assert pair.engine.token_logprobs(PROBE) == served[2]
    assert digest_tensors((name, sink.mirror.tensor(name)) for name in sink.mirror.names) == pair.engine.version


def test_a_version_holds_elements_and_scales_of_the_layers_and_nothing_else_quantised(pair: Pair):
    version = dict(pair.trainer.export())
    quantised = {name for name, tensor in version.items() if tensor.dtype == torch.float8_e4m3fn}
    assert quantised and all(name.endswith("_proj.weight") for name in quantised)
    assert {name for name, tensor in version.items() if tensor.dtype == torch.uint8} == {
        f"{n}_scale" for n in quantised
    }
    assert {tensor.dtype for name, tensor in version.items() if "norm" in name or "embed" in name} == {torch.float32}


def test_an_engine_s_own_weights_are_rounded_as_a_version_s(pair: Pair):
    """With an adapter the base model is never synced."""
    fresh = make_trainer(pair.folder)
    pair.engine.apply(fresh.export(), "first")
    before = pair.engine.token_logprobs(PROBE)
    pair.engine._llm.collective_rpc(_reload_and_emulate, args=(str(pair.folder),))
    pair.engine._llm.reset_prefix_cache()
    assert pair.engine.token_logprobs(PROBE) == before


def _reload_and_emulate(worker: Any, folder: str) -> None:
    from safetensors.torch import load_file

    from infra.models.checkpoint import checkpoint_shapes
    from infra.numerics.mxfp8 import quantized_names
    from tasks.rollout.vllm_cpu.mxfp8 import emulate
    from tasks.rollout.weights import loader

    loader.load(worker, list(load_file(Path(folder) / "model.safetensors").items()))
    emulate(worker, set(quantized_names(checkpoint_shapes(folder), MXFP8)))


def test_training_in_mxfp8_learns(pair: Pair):
    trainer = make_trainer(pair.folder)
    batch = [([5, 9, 200], [33, 17, 8, 1]), ([7], [120, 121, 122, 1])]
    losses = trainer.supervise([batch] * 12, lr=3e-3)
    assert losses[-1] < 0.5 * losses[0], losses


def test_padding_rows_to_32_tokens_changes_no_number(pair: Pair):
    plain, padded = make_trainer(pair.folder, mxfp8=None), make_trainer(pair.folder, mxfp8=None)
    padded.forward.row_multiple = 32
    expected, found = plain.update(scored()), padded.update(scored())
    for name in ("loss", "grad_norm", "k3_mean", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name


def test_a_device_without_the_units_needs_emulation(pair: Pair):
    with pytest.raises(BadInput, match=r"no GPU with MXFP8 units; set mxfp8\.emulation"):
        make_trainer(pair.folder, Mxfp8Config())
    with pytest.raises(BadInput, match=r"no GPU with MXFP8 units; set mxfp8\.emulation"):
        RolloutEngine(str(pair.folder), RolloutConfig(), mxfp8=Mxfp8Config())


def test_a_gpu_without_the_units_is_refused_by_trainer_and_engine(monkeypatch: pytest.MonkeyPatch):
    import vllm.platforms

    from tasks.rollout.mxfp8 import engine_arguments
    from tasks.update.mxfp8 import check_device

    def gpu(name: str, capability: int) -> None:
        platform = SimpleNamespace(
            is_cpu=lambda: False,
            has_device_capability=lambda wanted: capability >= wanted,
            get_device_name=lambda: name,
        )
        monkeypatch.setattr(vllm.platforms, "current_platform", platform)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: divmod(capability, 10))

    gpu("NVIDIA H200", 90)
    for asks in (check_device, engine_arguments):
        with pytest.raises(BadInput, match=r"NVIDIA H200 has no MXFP8 units \(Blackwell and later do\)"):
            asks(Mxfp8Config())
    gpu("NVIDIA B200", 100)
    check_device(Mxfp8Config())
    assert engine_arguments(Mxfp8Config())["quantization"] == "mxfp8"
    with pytest.raises(BadInput, match=r"mxfp8\.emulation: .* not those on NVIDIA B200; turn it off"):
        check_device(MXFP8)


def test_dimensions_must_be_divisible_by_32(tmp_path: Path):
    folder = tiny_models.experts(tmp_path)  # experts of 48
    with pytest.raises(BadInput, match=r"experts\..*down_proj\.weight is \[64, 48\], .* divisible by 32"):
        make_trainer(folder)
