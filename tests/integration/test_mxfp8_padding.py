"""What MXFP8's kernels ask of shapes: rows of 32 for every linear layer and every expert, and no number changed by them.

The kernels need a Blackwell GPU. What surrounds them runs here: the trainer with rows padded as for them, and Megatron's own
padding of the experts' tokens (its alltoall dispatcher), around the emulation.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
import torch

from infra.models import megatron_cpu
from infra.models.checkpoint import checkpoint_shapes
from infra.numerics.mxfp8 import BLOCK, Mxfp8Config
from tasks.update.config import UpdateConfig
from tests.integration.beam import test_trainer as beam_batches
from tests.integration.test_mxfp8 import MXFP8, PROBE, difference
from tests.integration.test_trainer import scored
from tests.support import tiny_models

megatron_cpu.install()
NATIVE = Mxfp8Config()


@pytest.fixture(scope="module", params=["dense", "beam"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return getattr(tiny_models, kind)(tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def batch(kind: str) -> pa.Table:
    """Prompts shared by their samples; for experts with the routes that are to be replayed."""
    return scored() if kind == "dense" else beam_batches.scored(whole=True)


def make_trainer(folder: Path, mxfp8: Mxfp8Config | None, multiple: int = 1) -> Any:
    """Rows padded to `multiple`; with experts, and 32, their tokens too: by the settings that a GPU's trainer has."""
    from tasks.update import trainer

    shapes = checkpoint_shapes(str(folder))
    native = trainer.megatron_settings(NATIVE, shapes) if multiple > 1 else {}
    kept = {name: value for name, value in native.items() if name == "moe_token_dispatcher_type"}
    config = UpdateConfig(precision="float32", weights="float32", lr=1e-3, microbatch_tokens=100)
    with mock.patch.object(trainer, "megatron_settings", return_value=kept):
        made = trainer.Trainer(str(folder), config, seed=1, mxfp8=mxfp8)
    made.forward.row_multiple = multiple
    for module in made.model.gpts[0].modules():
        if kept and hasattr(module, "token_dispatcher"):
            # With `fp8` Megatron would enter Transformer Engine; the dispatcher asks it for the multiple alone.
            pads = native["moe_router_padding_for_quantization"]
            module.token_dispatcher.config.moe_router_padding_for_quantization = pads
    return made


@pytest.fixture(scope="module", autouse=True)
def aligned_as_for_mxfp8():
    from megatron.core.fp8_utils import get_fp8_align_size
    from megatron.core.transformer.moe import token_dispatcher

    multiple = get_fp8_align_size(NATIVE_SETTINGS["fp8_recipe"])
    with mock.patch.object(token_dispatcher, "get_align_size_for_quantization", return_value=multiple):
        yield


NATIVE_SETTINGS = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}


def gradients(trainer: Any, batch: pa.Table) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics, gradients by Megatron's names) of an update that is not applied."""
    found: dict[str, torch.Tensor] = {}

    def keep(lr: float, grad_norm: float) -> None:
        masters = trainer.optimizer.masters.items()
        found.update({name: torch.zeros_like(m) if m.grad is None else m.grad.clone() for name, m in masters})

    with mock.patch.object(trainer.optimizer, "step", keep):
        metrics = trainer.update(batch)
    return metrics, found


def rows_of(trainer: Any, run: Any) -> dict[str, set[int]]:
    """{layer: numbers of rows that entered it} while `run` ran, of the layers that multiply in MXFP8."""
    rows: dict[str, set[int]] = {}
    hooks = []
    for name, module in trainer.model.gpts[0].named_modules():
        if "_forward_impl" in vars(module):  # what `emulate` has put there

            def note(module: Any, inputs: tuple, name: str = name) -> None:
                rows.setdefault(name, set()).add(inputs[0].numel() // inputs[0].shape[-1])

            hooks.append(module.register_forward_pre_hook(note))
    run()
    for hook in hooks:
        hook.remove()
    return rows


def quantised(trainer: Any) -> set[str]:
    """Megatron's names of the weights that multiply in MXFP8."""
    return {
        f"{name}.weight" for name, module in trainer.model.gpts[0].named_modules() if "_forward_impl" in vars(module)
    }


def test_every_product_in_mxfp8_gets_rows_of_32(kind: str, folder: Path, batch: pa.Table):
    plain, padded = make_trainer(folder, MXFP8), make_trainer(folder, MXFP8, BLOCK)
    loose = rows_of(plain, lambda: plain.update(batch))
    rows = rows_of(padded, lambda: padded.update(batch))
    assert any(n % BLOCK for numbers in loose.values() for n in numbers), "else nothing is padded here"
    assert {f"{name}.weight" for name in rows} == quantised(padded)
    assert not {name: numbers for name, numbers in rows.items() if any(n % BLOCK for n in numbers)}
    if kind == "beam":
        experts = {name: numbers for name, numbers in rows.items() if ".local_experts." in name}
        assert len(experts) == 3 * 16 * 2, "three layers of 16 experts of two products"


@pytest.mark.parametrize("mxfp8", [None, MXFP8], ids=["fp32", "MXFP8"])
def test_padding_changes_no_logprob_no_loss_and_no_gradient(folder: Path, batch: pa.Table, mxfp8: Mxfp8Config | None):
    plain, padded = make_trainer(folder, mxfp8), make_trainer(folder, mxfp8, BLOCK)
    assert difference(plain.token_logprobs(PROBE), padded.token_logprobs(PROBE)).max() < 1e-4
    (expected, exact), (found, gradient) = gradients(plain, batch), gradients(padded, batch)
    tokens = expected.pop("model_tokens")
    assert found.pop("model_tokens") == tokens, "padding is not counted"
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-3 if name == "grad_norm" else 1e-4, abs=1e-6), name
    rounded = quantised(plain) if mxfp8 else set()
    for name, tensor in exact.items():
        # A weight's gradient is contracted over tokens: padding shares the last of its blocks, and may move their scale.
        bound = 0.06 if name in rounded else 1e-4
        assert (gradient[name] - tensor).norm() <= bound * tensor.norm() + 1e-9, name


def test_sequence_parallelism_leaves_rows_of_32_on_each_rank(folder: Path, batch: pa.Table):
    """Experts are dealt a rank's own part of the tokens: 32 in all would be 16 on each of two."""
    from megatron.core.transformer.moe.moe_utils import pad_routing_map

    from tasks.update.batch import read_samples
    from tasks.update.packing import pack

    trainer = make_trainer(folder, None, BLOCK)
    parallel = trainer.config.parallel.model_copy(update={"tensor": 2, "sequence": True})
    trainer.forward.config = trainer.config.model_copy(update={"parallel": parallel})
    microbatches = trainer.forward.deal(pack(read_samples(batch, ()), 20, share_prompts=True))
    lengths = [len(microbatch.tokens_S) for microbatch in microbatches]
    assert min(lengths) == 2 * BLOCK and not [n for n in lengths if n % (2 * BLOCK)]
    for of_rank, aligned in ((BLOCK, True), (BLOCK // 2, False)):
        routes_TE = torch.rand(of_rank, 16, generator=torch.Generator().manual_seed(0)).argsort(1) < 4
        counts = pad_routing_map(routes_TE, BLOCK).sum(0)
        assert (not (counts % BLOCK).any()) == aligned


def test_megatron_accepts_the_settings_of_its_mxfp8_kernels(kind: str, folder: Path):
    """On the real provider of each family, finalised as on a GPU; only Transformer Engine's version is made up."""
    from megatron.bridge import AutoBridge
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_utils

    from infra.models.beam.register import register
    from tasks.update.mxfp8 import megatron_settings

    register(megatron=True)
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.apply_rope_fusion = False  # Transformer Engine's
    settings = megatron_settings(NATIVE, checkpoint_shapes(str(folder)))
    assert NATIVE_SETTINGS.items() <= settings.items()
    for name, value in settings.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    with mock.patch.object(transformer_config, "is_te_min_version", return_value=True):
        provider.finalize()
    assert moe_utils.get_align_size_for_quantization(provider) == BLOCK
    assert moe_utils.skip_routed_expert_padding(provider) == (kind == "beam"), "the dispatcher has padded them"
    assert megatron_settings(MXFP8, {}) == megatron_settings(NATIVE.model_copy(update={"train": False}), {}) == {}
