"""Samples into microbatches by a token budget, with each prompt laid out once for its samples.

A microbatch is one row of S tokens without padding, made of segments. With shared prompts a segment is a prompt, or a
response whose prefix is its prompt's segment: [prompt A][response A1][response A2]...[prompt B][response B1]... Without
sharing, a segment is a prompt with one response. A response's last token is a target only and is never an input.
Positions count from the start of the segment's own sequence, so a token sees exactly what it would see alone.

Shape suffixes: S tokens of a microbatch, N loss tokens in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tasks.update.batch import Sample
from tasks.update.routes import NONE


@dataclass(frozen=True)
class Segment:
    """Tokens [start, stop) of a row; they attend to the prefix [prefix_start, prefix_stop) and causally to themselves."""

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0


@dataclass(frozen=True)
class Microbatch:
    """What one forward and backward pass computes. Samples in it are whole."""

    tokens_S: Tensor
    """int64 [S]"""
    positions_S: Tensor
    """int64 [S], for the rotary embedding."""
    segments: tuple[Segment, ...]
    loss_index_N: Tensor
    """int64 [N]: the token whose hidden state predicts the target."""
    targets_N: Tensor
    """int64 [N]: token ids that count in the loss."""
    rollout_logprobs_N: Tensor
    """float32 [N]"""
    advantages_N: Tensor
    """float32 [N]"""
    samples: tuple[Sample, ...]
    """In the order in which they are laid out."""
    routes_SLK: Tensor | None = None
    """int16 [S, layers, experts a token]: what this process's routers replay, -1 where a token has no route."""

    weights_SLK: Tensor | None = None
    """float32 [S, layers, experts a token]: the weights of these experts, where they are replayed too."""
    padding: int = 0
    """Of the S tokens: how many, at the end, are no one's."""

    def to(self, device: torch.device) -> "Microbatch":
        """With the model's inputs, tokens and positions, on its device; what the loss needs goes there by itself."""
        return replace(self, tokens_S=self.tokens_S.to(device), positions_S=self.positions_S.to(device))

    def padded(self, length: int) -> "Microbatch":
        """With a sequence of padding behind, `length` tokens in all; padding is no target, and routed by the trainer."""
        missing = length - len(self.tokens_S)
        if missing == 0:
            return self
        zeros = torch.zeros(missing, dtype=torch.int64)
        routes = self.routes_SLK
        return replace(
            self,
            padding=self.padding + missing,
            tokens_S=torch.cat([self.tokens_S, zeros]),
            positions_S=torch.cat([self.positions_S, torch.arange(missing)]),
            segments=(*self.segments, Segment(len(self.tokens_S), length)),
            routes_SLK=None
            if routes is None
            else torch.cat([routes, routes.new_full((missing, *routes.shape[1:]), NONE)]),
        )


EMPTY = Microbatch(
    tokens_S=torch.zeros(0, dtype=torch.int64),
    positions_S=torch.zeros(0, dtype=torch.int64),
    segments=(),
    loss_index_N=torch.zeros(0, dtype=torch.int64),
    targets_N=torch.zeros(0, dtype=torch.int64),
    rollout_logprobs_N=torch.zeros(0),
    advantages_N=torch.zeros(0),
    samples=(),
)
"""Nothing: padded, it is what a process computes that has fewer microbatches than the others."""


def pack(samples: Iterable[Sample], budget: int, share_prompts: bool = True) -> list[Microbatch]:
    """Microbatches of at most `budget` tokens (a sample that is longer has one of its own).

    Samples of equal prompts come together; groups keep the order of their first sample, so packing is deterministic.
    Prompts that were routed otherwise are other prompts: each is replayed as it was generated.
    """
    groups: dict[bytes, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.tobytes() + sample.prompt_routes, []).append(sample)
    microbatches: list[Microbatch] = []
    row = _Row()
    for group in groups.values():
        shared = False  # the current row holds this group's prompt
        for sample in group:
            needed = len(sample.response) - 1 + (0 if shared else len(sample.prompt))
            if row.length and row.length + needed > budget:
                microbatches.append(row.microbatch())
                row, shared = _Row(), False
            if share_prompts:
                if not shared:
                    row.add_prompt(sample)
                    shared = True
                row.add_response(sample)
            else:
                row.add_sequence(sample)
    if row.length:
        microbatches.append(row.microbatch())
    return microbatches


@dataclass
class _Row:
    """A microbatch being laid out."""

    length: int = 0
    tokens: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    loss_index: list[np.ndarray] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    prompt: Segment = Segment(0, 0)

    def _add(self, sample: Sample, tokens: np.ndarray, first_position: int, prefix: Segment | None = None) -> Segment:
        if sample.routes is not None:
            self.routes.append(sample.routes[first_position : first_position + len(tokens)])
        start, stop = self.length, self.length + len(tokens)
        segment = Segment(start, stop, prefix.start, prefix.stop) if prefix else Segment(start, stop)
        self.tokens.append(tokens)
        self.positions.append(np.arange(first_position, first_position + len(tokens)))
        if len(tokens):
            self.segments.append(segment)
        self.length = stop
        return segment

    def add_prompt(self, sample: Sample) -> None:
        self.prompt = self._add(sample, sample.prompt, 0)

    def add_response(self, sample: Sample) -> None:
        """After `add_prompt` with its prompt: the first response token is predicted by the prompt's last."""
        response = self._add(sample, sample.response[:-1], len(sample.prompt), self.prompt)
        predictors = np.concatenate([[self.prompt.stop - 1], np.arange(response.start, response.stop)])
        self._add_targets(sample, predictors)

    def add_sequence(self, sample: Sample) -> None:
        whole = self._add(sample, np.concatenate([sample.prompt, sample.response[:-1]]), 0)
        self._add_targets(sample, np.arange(whole.start + len(sample.prompt) - 1, whole.stop))

    def _add_targets(self, sample: Sample, predictors_R: np.ndarray) -> None:
        self.loss_index.append(predictors_R[sample.mask])
        self.samples.append(sample)

    def microbatch(self) -> Microbatch:
        def joined(values: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(values))

        samples = self.samples
        return Microbatch(
            tokens_S=joined(self.tokens),
            positions_S=joined(self.positions),
            segments=tuple(self.segments),
            loss_index_N=joined(self.loss_index),
            targets_N=joined([sample.response[sample.mask] for sample in samples]),
            rollout_logprobs_N=joined([sample.logprobs[sample.mask] for sample in samples]),
            advantages_N=joined([sample.advantages[sample.mask] for sample in samples]),
            samples=tuple(samples),
            routes_SLK=joined(self.routes) if self.routes else None,
        )
