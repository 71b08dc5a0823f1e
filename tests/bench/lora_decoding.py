"""One engine of the bench lora_decode, in a process of its own: `python -m tests.bench.lora_decoding` with settings as JSON.

Prints one JSON line when it is loaded, and for each line on its standard input one with the tokens/s of a round.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

REQUESTS, NEW_TOKENS, PROMPT_TOKENS = 32, 48, 8
NO_PLUGIN = "none"
LIMITS = {"max_num_seqs": REQUESTS, "max_num_batched_tokens": 512}
"""Of all engines alike; vLLM computes a batch as large as it may become when it starts."""


def main() -> None:
    settings = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not ours
    engine = stock(settings) if settings["stock"] else ours(settings)
    print(json.dumps({"loaded": True}), file=out, flush=True)
    for _ in sys.stdin:
        print(json.dumps(decode(*engine)), file=out, flush=True)


def stock(settings: dict[str, Any]) -> tuple[Any, Any]:
    """vLLM as it is: without our plugin, an adapter from its folder, every other LoRA setting at its default."""
    os.environ |= {"VLLM_PLUGINS": NO_PLUGIN, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    import vllm
    from vllm.lora.request import LoRARequest

    rank = settings["rank"]
    llm = vllm.LLM(
        settings["model"],
        dtype=settings["dtype"],
        enforce_eager=settings["eager"],
        max_model_len=256,
        block_size=32,
        kv_cache_memory_bytes=2**28,
        **LIMITS,
        enable_lora=bool(rank),
        max_lora_rank=rank or 16,
        tensor_parallel_size=settings["tp"],
        pipeline_parallel_size=settings["pp"],
    )
    return llm, LoRARequest("policy", 1, settings["adapter"]) if rank else None


def ours(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The rollout engine."""
    from safetensors.torch import load_file

    from infra.policy.adapters import LoraConfig
    from tasks.rollout.config import RolloutConfig
    from tasks.rollout.engine import RolloutEngine

    lora = LoraConfig.model_validate(settings["lora"]) if settings["rank"] else None
    config = RolloutConfig(
        max_model_len=256,
        kv_cache_gib=0.25,
        dtype=settings["dtype"],
        engine=LIMITS,
        tensor_parallel_size=settings["tp"],
        pipeline_parallel_size=settings["pp"],
    )
    engine = RolloutEngine(settings["model"], config, lora)
    if lora is not None:
        folder = Path(settings["adapter"])
        config_json = json.loads((folder / "adapter_config.json").read_text())
        engine.apply_adapter(load_file(folder / "adapter_model.safetensors"), config_json, "bench")
    return engine._llm, engine._lora_request


def decode(llm: Any, request: Any) -> float:
    """Tokens/s of 32 concurrent requests with short prompts, greedy."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    prompts = [
        {"prompt_token_ids": [(17 * row + 5 * place) % 200 + 3 for place in range(PROMPT_TOKENS)]}
        for row in range(REQUESTS)
    ]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=request)
    seconds = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs)
    return REQUESTS * NEW_TOKENS / seconds


if __name__ == "__main__":
    main()
