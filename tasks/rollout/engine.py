"""The rollout engine: vLLM in this process, seeded sampling, and weights that are replaced in place."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pydantic import ValidationError

from infra.errors import BadInput
from infra.models.catalog import vocab_size
from infra.models.checkpoint import checkpoint_shapes
from infra.models.turns import stop_tokens
from infra.models.vocabulary import first_foreign, foreign_fault
from infra.numerics.mxfp8 import Mxfp8Config, dequantize_tensors, quantized_names
from infra.numerics.tensors import dtype_name
from infra.policy.adapters import LoraConfig, check_fits
from tasks.rollout import mxfp8 as microscaling
from tasks.rollout import tuned
from tasks.rollout.arguments import engine_arguments, has_experts, prepare_environment
from tasks.rollout.config import RolloutConfig
from tasks.rollout.requests import count, make_requests, rollout_table
from tasks.rollout.routes import expert_layers
from tasks.rollout.weights import adapter, prefix_cache

if TYPE_CHECKING:
    import torch
    from numpy import ndarray

    from infra.policy.codec.frame import Changes
    from infra.policy.follow import Prefetch
    from infra.policy.sink import PolicySink


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
        routes = config.routes == "auto" and has_experts(model_dir)
        if routes and config.pipeline_parallel_size > 1:
            raise BadInput(
                f"rollout.pipeline_parallel_size {config.pipeline_parallel_size}: vLLM records no routed experts over "
                "pipeline stages; use rollout.tensor_parallel_size, or set rollout.routes to off"
            )
        prepare_environment()
        if lora is not None:
            adapter.prepare_environment(lora, config.tensor_parallel_size)
        if mxfp8 is not None:
            microscaling.prepare_environment(mxfp8)
        from tasks.rollout.plugin import register

        register()
        import vllm
        from vllm.platforms import current_platform

        self._shapes = checkpoint_shapes(model_dir)
        self._route_layers = expert_layers(self._shapes) if routes else None
        self._lora_request: Any = None
        arguments = engine_arguments(model_dir, config, routes, lora, mxfp8)
        names = set(quantized_names(self._shapes, mxfp8)) if mxfp8 is not None else set()
        try:
            self._llm = vllm.LLM(**arguments)
        except ValueError as error:  # what does not fit together, or a KV cache too small for one sequence
            cache = f"kv_cache_gib {config.kv_cache_gib}, max_model_len {config.max_model_len}"
            raise BadInput(f"rollout: vLLM does not take these settings ({cache}): {_reason(error)}") from error
        if mxfp8 is not None and mxfp8.emulation:
            from tasks.rollout.vllm_cpu.mxfp8 import emulate

            self._llm.collective_rpc(emulate, args=(names,))
        if lora is not None and lora.tuned_configs is not None:
            tuned.tell_unused(self._llm.collective_rpc)
        self._forks = "kv_transfer_config" in arguments
        self._tokenizer: Any = self._llm.get_tokenizer()
        self._vocabulary = vocab_size(Path(model_dir))
        self.prefetched: Prefetch | None = None
        self._stepping = threading.RLock()
        """Held while the model computes a step, and while weights change."""
        self._llm.llm_engine.step = _locked(self._stepping, self._llm.llm_engine.step)
        self._sink = self._make_sink()
        self.loads_whole = self._sink.loads_whole
        model = self._llm.llm_engine.model_config
        self.max_model_len: int = model.max_model_len
        self.arithmetic = "mxfp8" if mxfp8 is not None else dtype_name(cast("torch.dtype", model.dtype))
        """What it computes in."""
        self.repeatable = current_platform.is_cpu()
        """Whether the same call, to another engine too, gives the same bits; on a GPU sums may be added up in any order."""

    def _make_sink(self) -> "PolicySink[Any]":
        from tasks.rollout.weights.mirrored_sink import MirroredSink

        quantised = self.mxfp8 is not None  # it holds what a version's elements and scales stand for, not those
        if self.config.tensor_parallel_size * self.config.pipeline_parallel_size == 1:
            from tasks.rollout.weights.model_sink import ModelSink

            sink = self._llm.collective_rpc(ModelSink, args=(self._shapes,))[0]
            whole_only = quantised or not sink.slots
        else:
            from tasks.rollout.weights.sharded_sink import ShardedSink

            call = _locked(self._stepping, self._llm.collective_rpc)
            sink, whole_only = ShardedSink(call, self._shapes, whole_only=quantised), quantised
        return MirroredSink(sink, dequantize_tensors if quantised else iter) if whole_only else sink

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
        response_tokens, finish_<reason>. Raises BadInput for an empty table, a malformed prompt or one with a token that the
        model has not, or when none fits.
        """
        self._check_usable()
        from vllm import SamplingParams

        def setting(value: Any, name: str) -> Any:
            return getattr(self.config, name) if value is None else value

        limit = setting(max_new_tokens, "max_new_tokens")
        requests = make_requests(
            self._tokenizer,
            prompts,
            samples=setting(samples, "samples_per_prompt"),
            seed=seed,
            new_tokens=limit,
            context=self.max_model_len,
            vocabulary=self._vocabulary,
        )
        params = [
            SamplingParams(
                temperature=setting(temperature, "temperature"),
                top_p=setting(top_p, "top_p"),
                max_tokens=limit,
                seed=request.seed,
                logprobs=0,
                detokenize=False,
            )
            for request in requests
        ]
        outputs = self._generate([request.prompt for request in requests], params, fork=True)
        table = rollout_table(
            self._tokenizer, requests, [o.outputs[0] for o in outputs], self.version or "", self._route_layers
        )
        return table, count(prompts, requests, table)

    def sample_turn(
        self, prompts: list[list[int]], seeds: list[int], limits: list[int], *, temperature: float, first: bool
    ) -> list[Any]:
        """vLLM's RequestOutput of one reply to each of `prompts` (token ids), of at most so many tokens as `limits` say.

        first: of a stage. Later turns find in the prefix cache what the earlier ones computed.
        """
        self._check_usable()
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                top_p=self.config.top_p,
                max_tokens=limit,
                seed=seed,
                logprobs=0,
                detokenize=False,
            )
            for seed, limit in zip(seeds, limits, strict=True)
        ]
        return self._generate(prompts, params, fork=first, keep=not first)

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self._tokenizer

    @property
    def vocabulary(self) -> int:
        """The model's tokens are 0..vocabulary - 1."""
        return self._vocabulary

    @property
    def route_layers(self) -> list[int] | None:
        """The layers whose routes are recorded; None: none are."""
        return self._route_layers

    def stops(self) -> frozenset[int]:
        """Tokens that end a reply."""
        generation: dict[str, Any] = self._llm.llm_engine.model_config.try_get_generation_config()
        return stop_tokens(self._tokenizer, generation.get("eos_token_id"))

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The logprob (nats, temperature 1) of each token but the first, given those before it."""
        self._check_usable()
        from vllm import SamplingParams

        for index, ids in enumerate(sequences):
            if (token := first_foreign(ids, self._vocabulary)) is not None:
                raise BadInput(f"sequence {index}: {foreign_fault(token, None, self._vocabulary)}")
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
        """A copy of a tensor's bits as the policy has it in `dtype` (infra/policy/codec/layout.py); None when the engine cannot tell:
        it holds the tensor in fewer bits, or, where it keeps the policy in a mirror, none was given yet."""
        return self._sink.words(name, dtype)

    def prepare(self, changes: "Iterable[tuple[str, torch.dtype, Changes]]") -> Any:
        """What `commit` will write, of a policy whose tensors' `words` the changes are relative to. Changes nothing."""
        return self._sink.prepare(changes)

    def prepare_whole(self, tensors: "Iterable[tuple[str, torch.Tensor]]") -> Any:
        """What `commit` will write to hold a full policy. Changes nothing."""
        if self.lora is not None:
            raise BadInput("the engine serves an adapter: it takes versions of form adapter, not full ones")
        return self._sink.prepare_whole(tensors)

    def prepare_adapter(self, tensors: "dict[str, torch.Tensor]", config: dict[str, Any]) -> adapter.AdapterUpdate:
        """What `commit` will write to serve an adapter in place of the last one: PEFT's names and 2-D layout, and its
        adapter_config.json. Changes nothing. BadInput names the module that does not fit."""
        if self.lora is None:
            raise BadInput("the engine was started without an adapter: set policy: lora in the profile")
        check_fits(tensors, self._shapes, self.lora.engine_rank)
        return adapter.AdapterUpdate(tensors, config)

    def commit(self, update: Any, version: str) -> None:
        """Write a prepared update; when it raises, the old weights are back, bit for bit.

        May be called from another thread while `sample` runs: it waits for the step that is being computed, and the
        requests in flight go on under the new weights, as `config.in_flight` says. Requests that are admitted later, in
        the same call too, find no KV of the old weights.
        """
        with self._stepping:
            if isinstance(update, adapter.AdapterUpdate):
                adapter.replace(self._llm.collective_rpc, update)
                self._lora_request = adapter.request()
            else:
                self._sink.commit(update, version)
            self.version = version
            if self.config.in_flight == "recompute":
                self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)  # raises if it cannot
            else:
                core: Any = self._llm.llm_engine.engine_core  # of an engine in this process
                prefix_cache.forget(core.engine_core.scheduler)

    def apply_adapter(self, tensors: "dict[str, torch.Tensor]", config: dict[str, Any], version: str) -> None:
        """Take over an adapter in place of the last one (see `prepare_adapter`)."""
        self.commit(self.prepare_adapter(tensors, config), version)

    def export(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """What the engine holds: checkpoint names and shapes, in the engine's dtypes. Views: copy what you keep."""
        from tasks.rollout.weights import loader

        if self.config.tensor_parallel_size * self.config.pipeline_parallel_size > 1:
            raise BadInput("export: only for an engine without tensor and pipeline parallelism")
        return self._llm.collective_rpc(loader.export, args=(list(self._shapes),))[0]

    def digests(self, dtypes: "dict[str, torch.dtype] | None" = None) -> dict[str, str]:
        """{name: digest} of what the engine holds (`infra.policy.version.tensor_digest`).

        dtypes: a tensor is cast to the one given for it first. An engine in float32 holds a bf16 policy exactly, so with
        the policy's dtypes its digests are the policy's own.
        """
        from infra.policy.version import tensor_digest

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

    def _generate(self, prompts: list[list[int]], params: list[Any], *, fork: bool, keep: bool = False) -> list[Any]:
        # Reuse within a call (or the turns of one) is what the prefix cache is for; reuse across calls would make results
        # depend on them.
        if not keep:
            self._llm.reset_prefix_cache()
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        if fork and self._forks:
            from tasks.rollout.prompt_fork import generate_forking

            return generate_forking(self._llm, inputs, params, self._lora_request)
        return self._llm.generate(inputs, params, use_tqdm=False, lora_request=self._lora_request)


def _reason(error: ValueError) -> str:
    """What vLLM, or pydantic for it, says in one line."""
    if isinstance(error, ValidationError):
        return "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
    return " ".join(str(error).split())


def _locked[**P, R](lock: AbstractContextManager[Any], function: Callable[P, R]) -> Callable[P, R]:
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with lock:
            return function(*args, **kwargs)

    return locked
