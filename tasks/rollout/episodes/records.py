"""One episode as it grows, and its rows of schema EPISODES."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from infra.storage import schemas
from tasks.rollout.requests import Request
from tasks.rollout.routes import routes_columns


@dataclass
class Row:
    """Tokens that only grow: a prompt, then replies and what lies between them."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    """nats; None: not sampled."""
    turn_ends: list[int] = field(default_factory=list)
    routes: Any = None
    """[tokens so far but the last, all layers, topk]."""

    @property
    def tokens(self) -> list[int]:
        """All of them."""
        return self.prompt + self.response

    def sampled(self, output: Any) -> None:
        """Append a reply, vLLM's CompletionOutput for the prompt `tokens`."""
        import numpy as np

        ids = list(output.token_ids)
        self.response += ids
        self.logprobs += [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)]
        self.turn_ends.append(len(self.response))
        if output.routed_experts is not None:
            # What a turn before has recorded stays: it is what its logprobs were computed with.
            known = 0 if self.routes is None else len(self.routes)
            new = output.routed_experts[known:]
            self.routes = new if self.routes is None else np.concatenate([self.routes, new])

    def observed(self, ids: list[int]) -> None:
        """Append what was not sampled."""
        self.response += ids
        self.logprobs += [None] * len(ids)


@dataclass
class Play:
    """One episode."""

    request: Request
    messages: list[Any]
    """What the chat template renders; replies are in it as they were sampled."""
    tools: list[dict[str, Any]] | None
    rows: list[Row]
    begun: float = field(default_factory=time.monotonic)
    rewards: list[float | None] = field(default_factory=list)
    """One a turn."""
    last: str = ""
    """The last reply."""
    cut: bool = False
    """Whether the last reply has no end: no turn can follow it."""
    ended: str | None = None
    detail: str = ""

    def end(self, how: str, detail: str = "") -> None:
        """Nothing is sampled any more."""
        self.ended, self.detail = self.ended or how, self.detail or detail

    def records(self, version: str, route_layers: list[int] | None) -> list[dict[str, Any]]:
        """Its rows; one without a token where nothing was sampled."""
        rows = [row for row in self.rows if row.turn_ends] or self.rows[:1]
        return [self._record(number, row, version, route_layers) for number, row in enumerate(rows)]

    def _record(self, number: int, row: Row, version: str, route_layers: list[int] | None) -> dict[str, Any]:
        size = row.turn_ends[-1] if row.turn_ends else 0  # an observation that nobody replied to teaches nothing
        record = {
            "prompt_id": self.request.prompt_id,
            "sample": self.request.sample,
            "prompt_ids": row.prompt,
            "response_ids": row.response[:size],
            "logprobs": row.logprobs[:size],
            "finish_reason": {"done": "stop"}.get(self.ended or "", "length"),
            "policy_version": version,
            "seed": self.request.seed,
            "response_text": self.last,
            "episode": f"{self.request.prompt_id}-{self.request.sample}",
            "row": number,
            "sampled": [logprob is not None for logprob in row.logprobs[:size]],
            "turn_ends": row.turn_ends,
            "turn_rewards": self.rewards,
            "conversation": json.dumps(self.messages),
            "ended": self.ended,
            "fault_detail": self.detail,
        }
        if route_layers is not None and row.routes is not None:
            record |= routes_columns(row.routes, len(row.prompt) + size, route_layers)
        return dict.fromkeys(schemas.ROUTES) | record
