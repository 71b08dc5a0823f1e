"""vLLM engines under test, on the device."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.numerics.mxfp8 import Mxfp8Config
from infra.policy.adapters import LoraConfig
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tests.gpu.device import DTYPE, ON_CPU

GRAPHS = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
}
"""CUDA graphs without torch.compile: what it would take a minute to compile is not what is checked."""


def settings(**changes: Any) -> RolloutConfig:
    """Small, with CUDA graphs where there is a GPU."""
    own = {"engine": {} if ON_CPU else GRAPHS, "dtype": DTYPE, "samples_per_prompt": 3, "max_new_tokens": 24}
    sizes = {"max_model_len": 128, "kv_cache_gib": 0.05 if ON_CPU else 0.25, "gpu_memory_utilization": 0.3}
    return RolloutConfig.model_validate(own | sizes | changes)


def engine(
    folder: Path, lora: LoraConfig | None = None, mxfp8: Mxfp8Config | None = None, **changes: Any
) -> RolloutEngine:
    """An engine that has loaded the folder."""
    return RolloutEngine(str(folder), settings(**changes), lora, mxfp8)


def addresses(worker: Any) -> dict[str, int]:
    """Inside vLLM: where each parameter lies."""
    return {name: parameter.data_ptr() for name, parameter in worker.model_runner.model.named_parameters()}


def graphs(worker: Any) -> bool:
    """Inside vLLM: whether decoding replays CUDA graphs."""
    mode = worker.model_runner.vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode.has_full_cudagraphs()


def apart(ours: list[list[float]], theirs: list[Any]) -> float:
    """Mean difference of logprobs, in nats."""
    flat = [np.concatenate([np.asarray(torch.as_tensor(part)) for part in side]) for side in (ours, theirs)]
    return float(np.abs(flat[0] - flat[1]).mean())
