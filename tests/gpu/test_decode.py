"""How fast an engine decodes, with an adapter and without, over the layouts that the devices allow. Told, not judged; what is judged
is that each layout computes the same policy."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.models.beam.tiny import write_beam_tiny
from infra.policy.adapters import LoraConfig
from tests.gpu.device import ON_CPU
from tests.gpu.engines import apart, engine
from tests.support.vllm_engines import PROBE, prompts

REQUESTS, TOKENS, ROUNDS = 32, 64, 2
GRID = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (8, 1), (4, 2), (2, 4)]
"""(pipeline stages, devices a layer is split over). Beam's KV heads allow up to 8 of the latter."""
ADAPTER = LoraConfig(rank=8, targets=("linear_qkv", "linear_proj"))
SAME = 0.05
"""Nats, mean, in bf16: another layout adds up in another order."""


def layouts() -> list[Any]:
    return [
        pytest.param(pp, tp, marks=pytest.mark.gpu(devices=pp * tp, cpu=pp * tp == 1), id=f"PP{pp} x TP{tp}")
        for pp, tp in GRID
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beam_tiny(tmp_path_factory.mktemp("beam") / "model")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[float]]:
    """The probe's logprobs on one device."""
    one = engine(folder)
    logprobs = one.token_logprobs(PROBE)
    one.close()
    return logprobs


@pytest.mark.parametrize("lora", [None, ADAPTER], ids=["plain", "adapter"])
@pytest.mark.parametrize(("pp", "tp"), layouts())
def test_decoding(pp: int, tp: int, lora: LoraConfig | None, folder: Path, alone: Any, record_property: Any):
    served = engine(
        folder,
        lora,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        routes="off",
        max_new_tokens=TOKENS,
        samples_per_prompt=REQUESTS,
    )
    assert apart(served.token_logprobs(PROBE), alone) < SAME
    rates = []
    for seed in range(ROUNDS + 1):  # the first one captures and compiles
        started = time.monotonic()
        rows, _ = served.sample(prompts("Count to a hundred."), seed=seed)
        tokens = sum(len(ids) for ids in rows["response_ids"].to_pylist())
        rates.append(tokens / (time.monotonic() - started))
        assert rows.num_rows == REQUESTS and 0 < tokens <= REQUESTS * TOKENS
    served.close()
    record_property("tokens_per_s", round(max(rates[1:]), 1))
    record_property("device", "cpu" if ON_CPU else torch.cuda.get_device_name())
