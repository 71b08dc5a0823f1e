"""`python -m tests.gpu_env.vllm_configs CAPABILITY FOLDER < cases`: each case through vLLM's EngineArgs, as JSON lines.

A case is {profile, settings, model}; its answer {name: value} of the VllmConfig, or {"refused": what vLLM says}.
A process of its own for a capability: vLLM asks its device once.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.gpu_env.device import present


def answer(case: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    from flows.settings import load_config
    from tasks.rollout.arguments import engine_arguments, has_experts, prepare_environment

    config = load_config(case["profile"], case["settings"])
    prepare_environment()
    routes = (
        config.rollout.routes == "auto" and has_experts(case["model"]) and config.rollout.pipeline_parallel_size == 1
    )
    arguments = engine_arguments(case["model"], config.rollout, routes, config.trained_lora, config.used_mxfp8)
    arguments.pop("use_tqdm_on_load")
    known = {name: value for name, value in arguments.items() if name in EngineArgs.__dataclass_fields__}
    assert known.keys() == arguments.keys(), arguments.keys() - known.keys()
    vllm = EngineArgs(**known).create_engine_config()
    return {
        "architecture": vllm.model_config.architecture,
        "dtype": str(vllm.model_config.dtype),
        "quantization": vllm.model_config.quantization,
        "tensor": vllm.parallel_config.tensor_parallel_size,
        "pipeline": vllm.parallel_config.pipeline_parallel_size,
        "executor": vllm.parallel_config.distributed_executor_backend,
        "cuda_graphs": not vllm.model_config.enforce_eager,
        "lora_rank": vllm.lora_config.max_lora_rank if vllm.lora_config else None,
        "routes": bool(vllm.model_config.enable_return_routed_experts),
        "max_model_len": vllm.model_config.max_model_len,
    }


def main() -> None:
    major, folder = int(sys.argv[1]), Path(sys.argv[2])
    present((major, 0), 8, folder)
    from tasks.rollout.plugin import register

    register()
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception as fault:
            found = {"refused": f"{type(fault).__name__}: {fault}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
