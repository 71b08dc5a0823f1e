"""The rollout engine: vLLM in this process, seeded sampling, and weights that are replaced in place."""

import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from infra import records
from infra.adapters import LoraConfig, check_fits
from infra.errors import BadInput
from infra.mxfp8 import Mxfp8Config, dequantize_tensors, quantized_names
from infra.tensors import checkpoint_shapes
from tasks.rollout import adapter
from tasks.rollout import mxfp8 as microscaling
from tasks.rollout.config import RolloutConfig

if TYPE_CHECKING:
    import torch
    from numpy import ndarray

    from infra.codec.frame import Changes
    from infra.follow import Prefetch
    from tasks.rollout.patches import Update
    from tasks.rollout.sink import ModelSink

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def load_engine(
    model: str, config: dict[str, Any], lora: dict[str, Any] | None = None, mxfp8: dict[str, Any] | None = None
) -> "RolloutEngine":
    """A RolloutEngine from JSON settings."""
    return RolloutEngine(
        model,
        RolloutConfig.model_validate(config),
        None if lora is None else LoraConfig.model_validate(lora),
        None if mxfp8 is None else Mxfp8Config.model_validate(mxfp8),
    )


class RolloutEngine:
    """Samples responses of the policy it holds, and takes over new policies.

    Deterministic: what is sampled, and its logprobs bit for bit, depend on the weights, the call's arguments and the
    machine alone, not on calls before it nor on how the weights came in.
    """

    def __init__(
        self,
        model_dir: str,
        config: RolloutConfig,
        lora: LoraConfig | None = None,
        mxfp8: Mxfp8Config | None = None,
    ):
        """Load the model of a Hugging Face folder. Raises BadInput when the folder or the settings do not fit.

        With `lora` the folder's weights stay as they are and policies are adapters (`apply_adapter`). With `mxfp8` linear
        layers and experts multiply in it, and policies hold elements and scales.
        """
        self.config, self.lora, self.mxfp8 = config, lora, mxfp8
        self.version: str | None = None
        """The policy digest given to the last `apply` or `commit`; None: the folder's own weights."""
        self._closed = False
        self._routes = config.routes == "auto" and has_experts(model_dir)
        if self._routes and config.pipeline_parallel_size > 1:
            raise BadInput(
                f"rollout.pipeline_parallel_size {config.pipeline_parallel_size}: vLLM records no routed experts over "
                "pipeline stages; use rollout.tensor_parallel_size, or set rollout.routes to off"
            )
        _prepare_environment(config)
        if lora is not None:
            adapter.prepare_environment(lora, config.tensor_parallel_size)
        if mxfp8 is not None:
            microscaling.prepare_environment(mxfp8)
        from tasks.rollout.plugin import register

        register()
        import vllm

        self._shapes = checkpoint_shapes(model_dir)
        self._expert_layers = expert_layers(self._shapes)
        self._lora_request: Any = None
        arguments = engine_arguments(model_dir, config, self._routes)
        if lora is not None:
            own = adapter.engine_arguments(lora, has_experts(model_dir), config.tensor_parallel_size)
            arguments = own | arguments
        names = set[str]()
        if mxfp8 is not None:
            names = set(quantized_names(self._shapes, mxfp8))
            arguments = microscaling.engine_arguments(mxfp8) | arguments
        self._llm = vllm.LLM(**arguments)
        if mxfp8 is not None and mxfp8.emulation:
            self._llm.collective_rpc(microscaling.emulate, args=(names,))
        self._forks = "kv_transfer_config" in arguments
        self._tokenizer: Any = self._llm.get_tokenizer()
        workers = config.tensor_parallel_size * config.pipeline_parallel_size
        self._sink: ModelSink | None = (
            self._llm.collective_rpc(_sink, args=(self._shapes,))[0] if workers == 1 else None
        )
        self.prefetched: Prefetch | None = None
        self._stepping = threading.Lock()
        """Held while the model computes a step, and while weights change."""
        self._llm.llm_engine.step = _locked(self._stepping, self._llm.llm_engine.step)
        self.max_model_len: int = self._llm.llm_engine.model_config.max_model_len

    def sample(
        self,
        prompts: pa.Table,
        *,
        samples: int | None = None,
        seed: int = 0,
        temperature: float | None = None,
        top_p: float | None = None,
        max_new_tokens: int | None = None,
    ) -> tuple[pa.Table, dict[str, Any]]:
        """`samples` responses for each of `prompts` (schema PROMPT): a table of schema ROLLOUT, and counts.

        Rows are in the prompts' order, samples 0..n-1 of each; None takes the config's setting; temperature 0 is greedy.
        logprobs: nats, of the distribution that was sampled (temperature, top_p), an EOS included when the model
        sampled it. stats: prompts, dropped_prompts (too long for the context with max_new_tokens), prompt_tokens,
        response_tokens, finish_<reason>. Raises BadInput for an empty table, a malformed prompt, or when none fits.
        """
        self._check_usable()
        from vllm import SamplingParams

        def setting(value: Any, name: str) -> Any:
            return getattr(self.config, name) if value is None else value

        samples, limit = setting(samples, "samples_per_prompt"), setting(max_new_tokens, "max_new_tokens")
        if len(prompts) == 0:
            raise BadInput("prompts: the table is empty")
        if samples < 1 or limit < 1:
            raise BadInput(f"samples ({samples}) and max_new_tokens ({limit}) must be at least 1")
        rows = [(row, self._prompt_ids(row)) for row in prompts.to_pylist()]
        kept = [(row, ids) for row, ids in rows if len(ids) + limit <= self.max_model_len]
        if not kept:
            raise BadInput(
                f"prompts: none of {len(rows)} fits the context of {self.max_model_len} tokens with {limit} new ones; "
                f"the shortest has {min(len(ids) for _, ids in rows)}"
            )
        jobs = [
            (row, ids, index, sample_seed(seed, row["prompt_id"], index))
            for row, ids in kept
            for index in range(samples)
        ]
        params = [
            SamplingParams(
                temperature=setting(temperature, "temperature"),
                top_p=setting(top_p, "top_p"),
                max_tokens=limit,
                seed=job[3],
                logprobs=0,
                detokenize=False,
            )
            for job in jobs
        ]
        outputs = self._generate([job[1] for job in jobs], params, fork=True)
        table = self._table(jobs, [output.outputs[0] for output in outputs])
        reasons = Counter(table["finish_reason"].to_pylist())
        stats = {
            "prompts": len(rows),
            "dropped_prompts": len(rows) - len(kept),
            "prompt_tokens": sum(len(ids) for _, ids in kept),
            "response_tokens": len(table["response_ids"].combine_chunks().flatten()),
            **{f"finish_{reason}": count for reason, count in sorted(reasons.items())},
        }
        return table, stats

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The logprob (nats, temperature 1) of each token but the first, given those before it."""
        self._check_usable()
        from vllm import SamplingParams

        for index, ids in enumerate(sequences):
            if not 0 < len(ids) < self.max_model_len:
                raise BadInput(
                    f"sequence {index}: {len(ids)} tokens, expected 1 to {self.max_model_len - 1} (the context less one)"
                )
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._generate([list(ids) for ids in sequences], [params] * len(sequences), fork=False)
        return [
            [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    def apply(self, tensors: "Iterable[tuple[str, torch.Tensor]]", version: str) -> None:
        """Take over a full policy in place: checkpoint names, any float dtype (cast to the engine's, per parameter).

        Only what differs is written. Nothing has changed when this raises: `tensors` may fail half-way or not fit the
        model (BadInput names the tensor), and should loading itself fail, the old weights are put back.
        """
        self.commit(self.prepare_whole(tensors), version)

    def words(self, name: str, dtype: "torch.dtype") -> "ndarray | None":
        """A copy of a checkpoint tensor's bits as the policy has it in `dtype` (infra/codec/layout.py); None when the engine
        cannot tell: it is spread over workers, or in a layout of a kernel's own, or held in fewer bits."""
        if self.mxfp8 is not None:  # it holds what a version's elements and scales stand for, not those
            return None
        return self._sink.words(name, dtype) if self._sink else None

    def prepare(self, changes: "Iterable[tuple[str, torch.dtype, Changes]]") -> "Update":
        """What `commit` will write, of a policy whose tensors' `words` the changes are relative to. Changes nothing."""
        assert self._sink is not None, "an engine without words is given no changes"
        return self._sink.prepare(changes)

    def prepare_whole(self, tensors: "Iterable[tuple[str, torch.Tensor]]") -> "Update":
        """What `commit` will write to hold a full policy. Changes nothing."""
        from tasks.rollout import patches, weights

        if self.lora is not None:
            raise BadInput("the engine serves an adapter: it takes versions of form adapter, not full ones")
        numbers = tensors if self.mxfp8 is None else dequantize_tensors(tensors)
        if self._sink:
            return self._sink.prepare_whole(numbers)
        return patches.Update([], {}, weights.collect(numbers, self._shapes))

    def prepare_adapter(self, tensors: "dict[str, torch.Tensor]", config: dict[str, Any]) -> adapter.AdapterUpdate:
        """What `commit` will write to serve an adapter in place of the last one: PEFT's names and 2-D layout, and its
        adapter_config.json. Changes nothing. BadInput names the module that does not fit."""
        if self.lora is None:
            raise BadInput("the engine was started without an adapter: set policy: lora in the profile")
        check_fits(tensors, self._shapes, self.lora.engine_rank)
        return adapter.AdapterUpdate(tensors, config)

    def commit(self, update: "Update | adapter.AdapterUpdate", version: str) -> None:
        """Write a prepared update; when it raises, the old weights are back, bit for bit.

        May be called from another thread while `sample` runs: it waits for the step that is being computed, and the
        requests in flight go on under the new weights, as `config.in_flight` says. KV of the old weights is dropped.
        """
        from tasks.rollout import weights

        with self._stepping:
            if isinstance(update, adapter.AdapterUpdate):
                self.version = None  # should vLLM fail, it holds neither adapter
                self._llm.collective_rpc(adapter.load, args=(update.tensors, update.config))
                self._lora_request = adapter.request()
            elif self._sink:
                self._sink.commit(update, version)
            else:
                weights.load_all_or_nothing(self._llm.collective_rpc, update.loaded or [])
            self.version = version
            recompute = self.config.in_flight == "recompute"
            self._llm.reset_prefix_cache(reset_running_requests=recompute, reset_connector=True)

    def apply_adapter(self, tensors: "dict[str, torch.Tensor]", config: dict[str, Any], version: str) -> None:
        """Take over an adapter in place of the last one (see `prepare_adapter`)."""
        self.commit(self.prepare_adapter(tensors, config), version)

    def export(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """What the engine holds: checkpoint names and shapes, in the engine's dtypes. Views: copy what you keep."""
        from tasks.rollout import weights

        if self.config.tensor_parallel_size * self.config.pipeline_parallel_size > 1:
            raise BadInput("export: only for an engine without tensor and pipeline parallelism")
        return self._llm.collective_rpc(weights.export, args=(list(self._shapes),))[0]

    def digests(self, dtypes: "dict[str, torch.dtype] | None" = None) -> dict[str, str]:
        """{name: digest} of what the engine holds (`infra.policy.tensor_digest`).

        dtypes: a tensor is cast to the one given for it first. An engine in float32 holds a bf16 policy exactly, so with
        the policy's dtypes its digests are the policy's own.
        """
        from infra.policy import tensor_digest

        cast = dtypes or {}
        return {name: tensor_digest(tensor.to(cast.get(name, tensor.dtype))) for name, tensor in self.export()}

    def close(self) -> None:
        """End vLLM in this process, so that an engine of another kind of model can be built in it."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        self._closed = True
        self._llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()

    def _check_usable(self) -> None:
        if self._closed:
            raise BadInput("the engine is closed")

    def _generate(self, prompts: list[list[int]], params: list[Any], *, fork: bool) -> list[Any]:
        # Reuse within a call is what the prefix cache is for; reuse across calls would make results depend on them.
        self._llm.reset_prefix_cache()
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        if not (fork and self._forks):
            return self._llm.generate(inputs, params, use_tqdm=False, lora_request=self._lora_request)
        # Each prompt is computed once, by its first sample; the others fork from it a step later (see fork.py).
        first: dict[tuple[int, ...], int] = {}
        for index, ids in enumerate(prompts):
            first.setdefault(tuple(ids), index)
        leaders = set(first.values())
        followers = [index for index in range(len(prompts)) if index not in leaders]
        done: list[Any] = []
        for wave in (sorted(leaders), followers):
            if wave:
                self._llm.enqueue(
                    [inputs[i] for i in wave],
                    [params[i] for i in wave],
                    use_tqdm=False,
                    lora_request=self._lora_request,
                )
                done += [output for output in self._llm.llm_engine.step() if output.finished]
        done += self._llm.wait_for_completion(use_tqdm=False)
        done.sort(key=lambda output: int(output.request_id))  # the order of the waves
        order = [*sorted(leaders), *followers]
        return [output for _, output in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])]

    def _prompt_ids(self, row: dict[str, Any]) -> list[int]:
        try:
            if row["text"] or not row["messages"]:
                ids = self._tokenizer(row["text"])["input_ids"]
            else:
                messages = json.loads(row["messages"])
                ids = self._tokenizer.apply_chat_template(
                    messages, tokenize=True, add_generation_prompt=True, return_dict=False
                )
        except Exception as error:
            raise BadInput(f"prompt {row['prompt_id']!r}: cannot be rendered: {error}") from error
        if not ids:
            raise BadInput(f"prompt {row['prompt_id']!r}: has no tokens")
        return list(ids)

    def _table(self, jobs: list[tuple[dict[str, Any], list[int], int, int]], outputs: list[Any]) -> pa.Table:
        texts = self._tokenizer.batch_decode([list(o.token_ids) for o in outputs], skip_special_tokens=True)
        rows = []
        for (row, ids, index, seed), output, text in zip(jobs, outputs, texts, strict=True):
            response = list(output.token_ids)
            rows.append(
                {
                    "prompt_id": row["prompt_id"],
                    "sample": index,
                    "prompt_ids": ids,
                    "response_ids": response,
                    "logprobs": [entry[token].logprob for token, entry in zip(response, output.logprobs, strict=True)],
                    "finish_reason": output.finish_reason,
                    "policy_version": self.version or "",
                    "seed": seed,
                    "response_text": text,
                    **(
                        routes_columns(output.routed_experts, len(ids) + len(response), self._expert_layers)
                        if self._routes
                        else {}
                    ),
                }
            )
        return pa.Table.from_pylist(rows, schema=records.ROLLOUT)


def _sink(worker: Any, shapes: dict[str, tuple[int, ...]]) -> "ModelSink | None":
    """Inside a vLLM worker: its model as a sink; None when only vLLM's loader knows where its tensors lie."""
    from tasks.rollout.sink import ModelSink

    sink = ModelSink(worker, shapes)
    return sink if sink.slots else None


def _locked(lock: threading.Lock, step: Callable[[], Any]) -> Callable[[], Any]:
    def locked() -> Any:
        with lock:
            return step()

    return locked


def sample_seed(seed: int, prompt_id: str, sample: int) -> int:
    """The seed of one response, 63 bits: a hash, so that no two responses of a run share random numbers."""
    digest = hashlib.sha256(json.dumps([seed, prompt_id, sample]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def routes_columns(routes: Any, tokens: int, layers: Sequence[int]) -> dict[str, Any]:
    """vLLM's routes [tokens - 1, all layers, topk] as the `routes*` columns of `tokens` tokens and `layers` alone.

    The last token has no route, and neither has one whose rows vLLM has never written: both are marked. Raises
    RuntimeError when routes are absent or too short: a trainer must not replay what was not recorded.
    """
    import numpy as np

    if routes is None or len(routes) < tokens - 1:
        raise RuntimeError(f"vLLM recorded routes of {0 if routes is None else len(routes)} of {tokens - 1} tokens")
    layers = [
        layer for layer in layers if layer < routes.shape[1]
    ]  # layers that only predict further tokens lie behind
    experts = np.zeros((tokens, len(layers), routes.shape[2]), routes.dtype)
    experts[: tokens - 1] = routes[: tokens - 1, layers]
    # A token's experts are distinct ones: zeros throughout are vLLM's empty buffer (unless there is one expert a token).
    written = experts.any((1, 2)) if routes.shape[2] > 1 else np.ones(tokens, dtype=bool)
    if tokens > 1 and not written[:-1].any():
        raise RuntimeError(f"vLLM recorded none of the routes of {tokens - 1} tokens")
    written[-1] = False
    return records.pack_routes(records.Routes(experts, written, tuple(layers)))


def expert_layers(names: Iterable[str]) -> list[int]:
    """The numbers of the layers that have routed experts, from a checkpoint's tensor names."""
    found = (re.search(r"\blayers\.(\d+)\..*\bexperts\b", name) for name in names)
    return sorted({int(match[1]) for match in found if match})


def has_experts(model_dir: str) -> bool:
    """Whether a Hugging Face folder's config tells of routed experts."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    config = config.get("text_config", config)
    return any((config.get(key) or 0) > 1 for key in _EXPERT_COUNTS)


def engine_arguments(model_dir: str, config: RolloutConfig, routes: bool) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM on this machine's device."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": model_dir,
        "dtype": ("auto" if not on_cpu or _cpu_has_bf16() else "float32") if config.dtype == "auto" else config.dtype,
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
            kv_connector="PromptFork", kv_role="kv_both", kv_connector_module_path="tasks.rollout.fork"
        )
    block_size = config.block_size or (32 if on_cpu else None)
    if block_size:
        arguments["block_size"] = block_size
    kv_cache_gib = config.kv_cache_gib or (1.0 if on_cpu else None)
    if kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if not on_cpu:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    return arguments | config.engine


def _cpu_has_bf16() -> bool:
    import torch

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _prepare_environment(config: RolloutConfig) -> None:
    """vLLM reads these when it is imported; what the user has set stays."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # The number of threads is the caller's choice (OMP_NUM_THREADS); pinning would put all engines on the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.tensor_parallel_size * config.pipeline_parallel_size == 1:
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        defaults["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc with functions of ours
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
