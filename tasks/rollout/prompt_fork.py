"""Samples of one prompt share all of its KV, not only whole blocks: the last, partial block is copied.

vLLM's prefix cache shares whole blocks. Of a prompt of 45 tokens with blocks of 32, each of n samples would compute 13
tokens again, which at short lengths is a third of all the work. Here a prompt is computed once, by its first sample; the
others, admitted a step later, copy its last block and compute only the prompt's last token.

A KV connector of vLLM (its interface for KV from elsewhere), one object on the scheduler's side and one on the worker's.
For an engine in one process with a single group of KV blocks and synchronous scheduling, that records no routes (vLLM
allows no connector with them).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


@dataclass
class Copies(KVConnectorMetadata):
    """Blocks to copy before a step: pairs (from, to)."""

    blocks: list[tuple[int, int]] = field(default_factory=list)


class PromptFork(KVConnectorBase_V1):
    """Copies the last block of a prompt from a running request that has computed the same prompt."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.block_size: int = vllm_config.cache_config.block_size
        self._sources: dict[tuple[int, ...], tuple[str, int]] = {}
        self._copies = Copies()

    # Scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a copy adds to `num_computed_tokens` cached ones: all but the prompt's last, or none."""
        prompt = tuple(request.prompt_token_ids)
        wanted = len(prompt) - 1 - num_computed_tokens
        first_run = request.num_tokens == len(prompt) and not request.skip_reading_prefix_cache
        if first_run and prompt in self._sources and 0 < wanted < self.block_size:
            return wanted, False
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the copy that fills the request's last block."""
        if num_external_tokens == 0:
            return
        prompt = tuple(request.prompt_token_ids)
        source, target = self._sources[prompt][1], blocks.get_block_ids()[0][self._last_block(prompt)]
        self._copies.blocks.append((source, target))

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """Hand over the step's copies; prompts that this step completes can be copied from the next on."""
        self._forget(scheduler_output.preempted_req_ids or ())
        for request in scheduler_output.scheduled_new_reqs:
            prompt = tuple(request.prompt_token_ids or ())
            computed = request.num_computed_tokens + scheduler_output.num_scheduled_tokens[request.req_id]
            if computed >= len(prompt):
                self._sources.setdefault(prompt, (request.req_id, request.block_ids[0][self._last_block(prompt)]))
        copies, self._copies = self._copies, Copies()
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A finished request's blocks may be given to others: it is no source any more."""
        self._forget((request.request_id,))
        return False, None

    def reset_cache(self) -> bool:
        """New weights: no new request may copy what was computed under the old ones."""
        self._sources.clear()
        return True

    def _forget(self, request_ids: Any) -> None:
        gone = set(request_ids)
        self._sources = {prompt: source for prompt, source in self._sources.items() if source[0] not in gone}

    def _last_block(self, prompt: tuple[int, ...]) -> int:
        """Index of the block that holds the last token but one: the last that a copy has to bring."""
        return max(len(prompt) - 2, 0) // self.block_size

    # Worker's side.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy the step's blocks, whole: what lies behind the prompt is overwritten before it is read.

        The caches are found by the context: vLLM keeps one worker-side connector a process, whatever the engine.
        """
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, Copies) or not metadata.blocks:
            return
        sources, targets = torch.tensor(metadata.blocks).unbind(1)
        for layer in forward_context.no_compile_layers.values():
            cache = getattr(layer, "kv_cache", None)  # [blocks, ...]
            if cache is not None:
                cache[targets] = cache[sources]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: copies are done."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved elsewhere."""

    def wait_for_save(self) -> None:
        """Nothing is saved elsewhere."""


def generate_forking(llm: Any, inputs: list[Any], params: list[Any], lora_request: Any) -> list[Any]:
    """As `llm.generate`: each prompt is computed once, by its first sample; the others fork from it a step later."""
    first: dict[tuple[int, ...], int] = {}
    for index, prompt in enumerate(inputs):
        first.setdefault(tuple(prompt["prompt_token_ids"]), index)
    leaders = set(first.values())
    followers = [index for index in range(len(inputs)) if index not in leaders]
    done: list[Any] = []
    for wave in (sorted(leaders), followers):
        if wave:
            llm.enqueue([inputs[i] for i in wave], [params[i] for i in wave], use_tqdm=False, lora_request=lora_request)
            done += [output for output in llm.llm_engine.step() if output.finished]
    done += llm.wait_for_completion(use_tqdm=False)
    done.sort(key=lambda output: int(output.request_id))  # the order of the waves
    order = [*sorted(leaders), *followers]
    return [output for _, output in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])]
