"""Every layout of the trainer and both precisions, through Bridge's provider and Megatron's own validation, on a presented GPU;
the GPU profiles' at their model's full size. And the profiles' reservations, through Ray's placement."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from flows.settings import load_config
from infra.engines.capacity import fits
from infra.models.beam.config import BeamConfig
from infra.models.checkpoint import checkpoint_shapes
from infra.numerics.mxfp8 import Mxfp8Config
from tasks.update.config import ParallelConfig, UpdateConfig
from tasks.update.mxfp8 import megatron_settings
from tests.gpu_env.device import presented_to_torch
from tests.support import tiny_models

BEAM = ("beam-bf16", "beam-lora", "beam-mxfp8")
NODE = {"CPU": 128.0, "GPU": 8.0, "memory": 1024 * 2.0**30}
"""Eight GPUs, as docs and profiles ask for."""


def configured(folder: Path, config: UpdateConfig, settings: dict[str, Any]) -> Any:
    """Megatron's configuration as `load_policy` makes it: ValueError or AssertionError where Megatron refuses."""
    from megatron.bridge import AutoBridge

    from tasks.update.model import _configure

    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    _configure(provider, torch.bfloat16, config, settings)
    return provider


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with presented_to_torch():
        from infra.models.beam.register import register

        register(megatron=True)
        yield


def layouts(experts: bool) -> Iterator[ParallelConfig]:
    for tensor, pipeline, virtual, data, expert in itertools.product((1, 2), (1, 2), (None, 2), (1, 2), (1, 2)):
        if expert > 1 and not experts:  # refused: infra/models/layout.py
            continue
        sequence = tensor > 1
        try:
            yield ParallelConfig(
                tensor=tensor, pipeline=pipeline, virtual=virtual, data=data, expert=expert, sequence=sequence
            )
        except ValidationError:
            continue


@pytest.mark.parametrize("model", ["dense", "experts", "beam"])
@pytest.mark.parametrize("mxfp8", [None, Mxfp8Config()], ids=["bf16", "mxfp8"])
def test_megatron_takes_every_layout_that_we_take(model: str, mxfp8: Mxfp8Config | None, tmp_path: Path):
    folder = getattr(tiny_models, model)(tmp_path / model)
    settings = {} if mxfp8 is None else megatron_settings(mxfp8, checkpoint_shapes(str(folder)))
    for parallel in layouts(experts=model != "dense"):
        provider = configured(folder, UpdateConfig(parallel=parallel), settings)
        assert provider.fp8_recipe == "mxfp8" if mxfp8 else provider.fp8 is None
        assert provider.variable_seq_lengths == (parallel.pipeline > 1), parallel
        assert model == "dense" or (provider.moe_grouped_gemm and provider.moe_token_dispatcher_type == "alltoall")


@pytest.mark.parametrize("name", BEAM)
def test_megatron_takes_each_profile_at_full_size(name: str, tmp_path: Path):
    BeamConfig(architectures=["BeamForCausalLM"]).save_pretrained(tmp_path)
    config = load_config(name)
    shapes = {"model.layers.23.mlp.experts.0.up_proj.weight": (768, 2048)}  # of the last layer's
    settings = megatron_settings(config.used_mxfp8, shapes) if config.used_mxfp8 else {}
    provider = configured(tmp_path, config.update, settings)
    assert (provider.num_layers, provider.num_moe_experts) == (24, 128)
    assert provider.tensor_model_parallel_size * provider.pipeline_model_parallel_size == config.resources.update_gpus


@pytest.mark.parametrize("name", ["smollm2-gpu", *BEAM])
def test_ray_places_each_profile_on_one_node_of_eight(name: str):
    wanted = load_config(name).resources
    needs = [
        {"CPU": 1.0, "GPU": gpus, "memory": (memory or 0) * 2**30}
        for gpus, memory in (
            (wanted.rollout_gpus, wanted.rollout_memory_gib),
            (wanted.update_gpus, wanted.update_memory_gib),
        )
    ]
    assert fits([NODE], needs)
    assert not fits([NODE | {"GPU": wanted.gpus(at_once=True) - 1}], needs)
