"""A rollout's requests: rendered prompts, a seed for each response, and the table and counts of what came back."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from infra.errors import BadInput
from infra.models.chat import prompt_ids
from infra.models.vocabulary import first_foreign, foreign_fault
from infra.storage import schemas
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
    tokenizer: Any, prompts: pa.Table, *, samples: int, seed: int, new_tokens: int, context: int, vocabulary: int
) -> list[Request]:
    """`samples` for each of `prompts` (schema PROMPT) that fits in `context` with `new_tokens` more; in their order.

    vocabulary: the model's tokens are 0..vocabulary - 1. Raises BadInput for an empty table, a malformed prompt or one with
    a token that the model has not, or when none fits.
    """
    if len(prompts) == 0:
        raise BadInput("prompts: the table is empty")
    if samples < 1 or new_tokens < 1:
        raise BadInput(f"samples ({samples}) and max_new_tokens ({new_tokens}) must be at least 1")
    rows = [(row["prompt_id"], prompt_ids(tokenizer, row)) for row in prompts.to_pylist()]
    kept = [(name, ids) for name, ids in rows if len(ids) + new_tokens <= context]
    if not kept:
        raise BadInput(
            f"prompts: none of {len(rows)} fits the context of {context} tokens with {new_tokens} new ones; "
            f"the shortest has {min(len(ids) for _, ids in rows)}"
        )
    for name, ids in kept:
        if (token := first_foreign(ids, vocabulary)) is not None:
            text = tokenizer.convert_ids_to_tokens(token)
            raise BadInput(f"prompt {name!r}: {foreign_fault(token, text, vocabulary)}")
    return [Request(name, ids, index, sample_seed(seed, name, index)) for name, ids in kept for index in range(samples)]


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
    texts = response_texts(tokenizer, outputs)
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
    return pa.Table.from_pylist(rows, schema=schemas.ROLLOUT)


def response_texts(tokenizer: Any, outputs: Sequence[Any]) -> list[str]:
    """The text of each output as it was sampled, special tokens too, less the token that ended it if one did."""
    # vLLM stops at tokens only (never at strings, which `sample` does not set), and then that token is the last.
    bodies = [list(o.token_ids[:-1] if o.finish_reason == "stop" else o.token_ids) for o in outputs]
    return tokenizer.batch_decode(bodies, skip_special_tokens=False, clean_up_tokenization_spaces=False)


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
