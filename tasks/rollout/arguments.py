"""How vLLM is built: its keyword arguments, and the environment that it reads when it is imported."""

import os
from pathlib import Path
from typing import Any

from infra.models.layout import Sizes
from infra.numerics.mxfp8 import Mxfp8Config
from infra.numerics.tensors import multiplies_bf16
from infra.policy.adapters import LoraConfig
from tasks.rollout import mxfp8 as microscaling
from tasks.rollout.config import RolloutConfig
from tasks.rollout.weights import adapter


def has_experts(model_dir: str) -> bool:
    """Whether a Hugging Face folder's config tells of routed experts."""
    return Sizes.of(Path(model_dir)).experts > 0


def engine_arguments(
    model_dir: str,
    config: RolloutConfig,
    routes: bool,
    lora: LoraConfig | None = None,
    mxfp8: Mxfp8Config | None = None,
) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM on this machine's device. BadInput when the device cannot do what is asked for."""
    arguments: dict[str, Any] = {}
    if lora is not None:
        arguments |= adapter.engine_arguments(lora, has_experts(model_dir), config.tensor_parallel_size)
    if mxfp8 is not None:
        arguments |= microscaling.engine_arguments(mxfp8)
    return arguments | _plain_arguments(model_dir, config, routes)


def _plain_arguments(model_dir: str, config: RolloutConfig, routes: bool) -> dict[str, Any]:
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        **_as_transformers_reads(model_dir),
        "dtype": "float32" if on_cpu and config.dtype == "auto" and not multiplies_bf16() else config.dtype,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "enable_return_routed_experts": routes,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "max_model_len": config.max_model_len,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu and not routes and config.tensor_parallel_size * config.pipeline_parallel_size == 1:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="PromptFork", kv_role="kv_both", kv_connector_module_path="tasks.rollout.prompt_fork"
        )
    block_size = config.block_size or (32 if on_cpu else None)
    if block_size:
        arguments["block_size"] = block_size
    kv_cache_gib = config.kv_cache_gib or (1.0 if on_cpu else None)
    if kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if on_cpu:
        # A prompt is computed in one step: after a part of one, vLLM rewinds the request's random numbers by an offset that
        # a CPU's generator does not have, and fails.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    return arguments | config.engine


def _as_transformers_reads(model_dir: str) -> dict[str, Any]:
    """By its config.json and the weight files of infra/models/checkpoint.py. Left to itself vLLM takes consolidated*.safetensors,
    Mistral's own format, where a folder has it besides."""
    arguments = {"model": model_dir, "config_format": "hf", "load_format": "safetensors"}
    besides = any(Path(model_dir).glob("consolidated*.safetensors"))
    return arguments | {"tokenizer_mode": "hf"} if besides else arguments  # some families have a mode of their own


def prepare_environment() -> None:
    """vLLM reads these when it is imported; what the user has set stays."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # The model runner that is tried here, and whose model and adapters are reached into. With Triton, so on GPUs, vLLM
        # would take its second one.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # The number of threads is the caller's choice (OMP_NUM_THREADS); pinning would put all engines on the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        # The scheduler in this process (workers are processes of their own where there are several): it loads faster, and a
        # message to the workers cannot come between those of a step.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
