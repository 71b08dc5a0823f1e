"""Settings of rollout generation."""

import ast
import difflib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from infra.config import Config

OWNED = {
    "model": "the setting model",
    "model_weights": "the setting model",
    "tokenizer": "the setting model, whose folder has the tokenizer",
    "skip_tokenizer_init": "the engine, which needs the tokenizer",
    "runner": "the engine, which generates",
    "convert": "the engine, which generates",
    "seed": "the setting seed",
    "logprobs_mode": "the trainer, which needs processed_logprobs",
    "quantization": "the setting precision",
    "enable_lora": "the setting policy",
    "max_lora_rank": "the setting lora.rank",
    "max_loras": "the engine, in which one adapter serves every request",
    "lora_target_modules": "the setting lora.targets",
    "enable_moe_shared_loras": "the setting lora.experts",
    "enable_return_routed_experts": "rollout.routes",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
} | {
    name: f"rollout.{name}"
    for name in (
        "dtype",
        "max_model_len",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "enforce_eager",
        "block_size",
        "gpu_memory_utilization",
    )
}
"""Arguments of vLLM's that settings of ours decide, and which."""


@cache
def engine_argument_names() -> set[str]:
    """Keyword arguments that vllm.LLM takes: the fields of its EngineArgs, read off the source, because importing vLLM
    takes seconds. Empty where vLLM is not installed."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return set()
    source = Path(package.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    fields = next(c for c in ast.parse(source).body if isinstance(c, ast.ClassDef) and c.name == "EngineArgs").body
    return {f.target.id for f in fields if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)}


class RolloutConfig(Config):
    """Sampling on vLLM: what is sampled, and how the engine is built."""

    prompts_per_step: int = Field(8, ge=1)
    """Prompts of a step."""
    samples_per_prompt: int = Field(8, ge=1)
    """Responses sampled for each prompt: the group that advantages are normalised over."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens that together have this probability; 1 keeps all. Below 1, logprobs are
    of the cut distribution, which the trainer does not reproduce."""
    max_new_tokens: int = Field(24, ge=1)
    """Longest response in tokens."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt and response together, in tokens; null: the model's context."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations. auto: float32 on a CPU without bf16 units (it is several times slower in bf16), else vLLM's
    choice: the model's 16-bit dtype, bfloat16 for a model in float32, as the trainer's."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory of the KV cache in GiB; null: 1 on a CPU, what gpu_memory_utilization leaves on a GPU."""
    block_size: int | None = Field(None, ge=1)
    """Tokens of a KV block. Samples of one prompt share its whole blocks; null: 32 on a CPU, vLLM's choice on a GPU."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that each layer is split over."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Groups of GPUs that the layers are divided among."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that the engine may take (weights, activations, KV cache)."""
    enforce_eager: bool | None = None
    """Run without compilation and CUDA graphs; null: yes on a CPU (faster to load), no on a GPU."""
    routes: Literal["auto", "off"] = "auto"
    """Record the experts that each token was routed to, for replay in the trainer. auto: when the model has experts."""
    in_flight: Literal["keep", "recompute"] = "keep"
    """Requests that are running when new weights come. keep: they go on with the KV that they have. recompute: they are
    interrupted and resumed, all of their KV computed anew under the new weights. A run samples nothing while it syncs: this is
    for those who drive the engine themselves."""
    engine: dict[str, Any] = {}
    """Further keyword arguments of vllm.LLM, e.g. {"max_num_seqs": 64}; not those that other settings decide."""

    @field_validator("engine")
    @classmethod
    def _known(cls, engine: dict[str, Any]) -> dict[str, Any]:
        known = engine_argument_names() if engine else set()
        for name in engine:
            if name in OWNED:
                raise ValueError(f"{name} is decided by {OWNED[name]}")
            if known and name not in known:
                close = difflib.get_close_matches(name, known - OWNED.keys(), n=3)
                raise ValueError(
                    f"vLLM's engine has no argument {name!r}" + (f"; did you mean {', '.join(close)}?" if close else "")
                )
        return engine

    @property
    def workers(self) -> int:
        """Processes of vLLM that hold a part of the model, one a device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def whole_experts(self) -> bool:
        """Whether experts are spread, whole, over the tensor-parallel devices; else each is split over them."""
        return bool(self.engine.get("enable_expert_parallel"))

    @model_validator(mode="after")
    def _fits(self) -> "RolloutConfig":
        if self.max_model_len is not None and self.max_new_tokens >= self.max_model_len:
            raise ValueError(
                f"max_new_tokens ({self.max_new_tokens}) must be below max_model_len ({self.max_model_len}), or no prompt fits"
            )
        blocks, size = self.engine.get("num_gpu_blocks_override"), self.block_size or 32  # a GPU's blocks are smaller
        if blocks is not None and self.max_model_len is not None and (int(blocks) - 1) * size < self.max_model_len:
            raise ValueError(
                f"engine: num_gpu_blocks_override ({blocks}): vLLM keeps one block back, and {int(blocks) - 1} of {size} tokens hold "
                f"no sequence of max_model_len ({self.max_model_len}); give it {-(-self.max_model_len // size) + 1} or more"
            )
        return self
