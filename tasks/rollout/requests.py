"""A rollout's requests: rendered prompts, a seed for each response, and the table and counts of what came back."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from infra import records
from infra.errors import BadInput
from tasks.rollout.routes import routes_columns


@dataclass(frozen=True)
class Request:
    """One response to sample."""

    prompt_id: str
    prompt: list[int]
    """Token ids, at least one."""
    sample: int
    """0, 1, ... among the prompt's responses."""
    seed: int
    """Of this response alone, 63 bits."""


def make_requests(
    tokenizer: Any, prompts: pa.Table, *, samples: int, seed: int, new_tokens: int, context: int
) -> list[Request]:
    """`samples` for each of `prompts` (schema PROMPT) that fits in `context` with `new_tokens` more; in their order.

    Raises BadInput for an empty table, a malformed prompt, or when none fits.
    """
    if len(prompts) == 0:
        raise BadInput("prompts: the table is empty")
    if samples < 1 or new_tokens < 1:
        raise BadInput(f"samples ({samples}) and max_new_tokens ({new_tokens}) must be at least 1")
    rows = [(row["prompt_id"], prompt_tokens(tokenizer, row)) for row in prompts.to_pylist()]
    kept = [(name, ids) for name, ids in rows if len(ids) + new_tokens <= context]
    if not kept:
        raise BadInput(
            f"prompts: none of {len(rows)} fits the context of {context} tokens with {new_tokens} new ones; "
            f"the shortest has {min(len(ids) for _, ids in rows)}"
        )
    return [Request(name, ids, index, sample_seed(seed, name, index)) for name, ids in kept for index in range(samples)]


def prompt_tokens(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """The token ids of one prompt: its text, or its messages by the chat template. BadInput when there are none."""
    try:
        if row["text"] or not row["messages"]:
            ids = tokenizer(row["text"])["input_ids"]
        else:
            messages = json.loads(row["messages"])
            ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    except Exception as error:
        raise BadInput(f"prompt {row['prompt_id']!r}: cannot be rendered: {error}") from error
    if not ids:
        raise BadInput(f"prompt {row['prompt_id']!r}: has no tokens")
    return list(ids)


def sample_seed(seed: int, prompt_id: str, sample: int) -> int:
    """The seed of one response, 63 bits: a hash, so that no two responses of a run share random numbers."""
    digest = hashlib.sha256(json.dumps([seed, prompt_id, sample]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def rollout_table(
    tokenizer: Any,
    requests: Sequence[Request],
    outputs: Sequence[Any],
    version: str,
    route_layers: Sequence[int] | None,
) -> pa.Table:
    """A table of schema ROLLOUT. outputs: vLLM's CompletionOutput of each request; route_layers: the layers whose routes
    are kept, None: no routes."""
    texts = tokenizer.batch_decode([list(output.token_ids) for output in outputs], skip_special_tokens=True)
    rows = []
    for request, output, text in zip(requests, outputs, texts, strict=True):
        response = list(output.token_ids)
        row = {
            "prompt_id": request.prompt_id,
            "sample": request.sample,
            "prompt_ids": request.prompt,
            "response_ids": response,
            "logprobs": [entry[token].logprob for token, entry in zip(response, output.logprobs, strict=True)],
            "finish_reason": output.finish_reason,
            "policy_version": version,
            "seed": request.seed,
            "response_text": text,
        }
        if route_layers is not None:
            row |= routes_columns(output.routed_experts, len(request.prompt) + len(response), route_layers)
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=records.ROLLOUT)


def count(prompts: pa.Table, requests: Sequence[Request], rollouts: pa.Table) -> dict[str, Any]:
    """prompts, dropped_prompts, prompt_tokens (each kept prompt once), response_tokens, finish_<reason>."""
    kept = [request for request in requests if request.sample == 0]
    reasons = Counter(rollouts["finish_reason"].to_pylist())
    return {
        "prompts": len(prompts),
        "dropped_prompts": len(prompts) - len(kept),
        "prompt_tokens": sum(len(request.prompt) for request in kept),
        "response_tokens": len(rollouts["response_ids"].combine_chunks().flatten()),
        **{f"finish_{reason}": number for reason, number in sorted(reasons.items())},
    }
