"""Replay of routed experts through Megatron's RouterReplay, bound by layer number, microbatch by microbatch.

Megatron switches between forward and backward replay for all layers at once; pipeline schedules interleave the two. So
each router's replay tells them apart itself: with activation recomputation a router runs twice, first without and then
with autograd, and backwards come in the order of the forwards. That makes a queue enough, for any schedule.

Shapes: S tokens of a microbatch (with sequence parallelism this rank's part of them), L layers, K experts a token.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from tasks.update.routes import NONE, RoutedModel


class Target(NamedTuple):
    """What a router replays of a microbatch."""

    experts_SK: Tensor
    """int64, NONE where a token has no route."""
    weights_SK: Tensor | None
    """float32, the weights of these experts; None: the router's own, with their gradient."""


class LayerReplay(RouterReplay):
    """One router's replay: tokens without a route are routed by the router itself."""

    def __init__(self) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)  # routers are found by their layer, not by this list
        self.target: Target | None = None
        self.training = False
        self.queue: deque[Target | None] = deque()
        self.recorded: list[tuple[Tensor, Tensor]] = []
        self._now: Target | None = None
        self._chosen_SK: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores of the chosen experts, their ids), each [S, K]. Called by the router, once a forward or recomputation."""
        assert default_compute_topk is not None
        self._now = self._of_this_call()
        if self._now is None:
            values, self._chosen_SK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            return values, self._chosen_SK
        chosen = self._now.experts_SK.to(scores.device)
        missing = chosen[:, :1] == NONE
        if missing.any():
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            chosen = torch.where(missing, own, chosen)
        self._chosen_SK = chosen
        return scores.gather(1, chosen), chosen

    def after_router(self, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """A forward hook of the router, whose output is (weights [S, E], chosen [S, E]): record, or replay weights."""
        probs_SE, map_SE = output
        chosen = self._chosen_SK
        assert chosen is not None
        if self.router_replay_action == RouterReplayAction.RECORD:
            self.recorded.append((chosen, probs_SE.detach().gather(1, chosen).float()))
        if self._now is None or self._now.weights_SK is None:
            return None
        own = probs_SE.gather(1, chosen)
        missing = self._now.experts_SK[:, :1] == NONE
        weights = torch.where(missing.to(own.device), own, self._now.weights_SK.to(own.device, own.dtype))
        return torch.zeros_like(probs_SE).scatter(1, chosen, weights), map_SE

    def _of_this_call(self) -> Target | None:
        """What this call replays: the current microbatch's, or in a recomputation that of the one it belongs to."""
        if self.training and not torch.is_grad_enabled():
            self.queue.append(self.target)
        elif self.queue:
            return self.queue.popleft()
        return self.target


class RoutingReplay:
    """The routers of this rank's model chunks, and what they replay."""

    def __init__(self, chunks: Sequence[Any]):
        self.config = chunks[0].config
        self.by_chunk: dict[int, dict[int, LayerReplay]] = {}
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            for router in routers:
                router.router_replay = LayerReplay()
                router.register_forward_hook(router.router_replay.after_router)
            self.by_chunk[id(chunk)] = {router.layer_number - 1: router.router_replay for router in routers}
        self.layers: tuple[int, ...] = tuple(sorted(n for routers in self.by_chunk.values() for n in routers))
        """The numbers N of `model.layers.N` with experts on this rank."""

    @property
    def model(self) -> RoutedModel | None:
        """What routes of the whole model look like; None for a model without experts."""
        if not self.config.num_moe_experts:
            return None
        frequency = self.config.moe_layer_freq
        if isinstance(frequency, int):
            frequency = [int(layer % frequency == 0) for layer in range(self.config.num_layers)]
        layers = tuple(layer for layer, sparse in enumerate(frequency) if sparse)
        return RoutedModel(layers, self.config.moe_router_topk, self.config.num_moe_experts)

    @contextmanager
    def schedule(self, training: bool) -> Iterator[None]:
        """Around a schedule. Raises RuntimeError if a recomputation did not happen that should have."""
        for replay in self._all():
            replay.training = training
        try:
            yield
            if any(replay.queue for replay in self._all()):
                raise RuntimeError("a router ran without autograd in training, and was never recomputed")
        finally:
            for replay in self._all():
                replay.training, replay.target = False, None
                replay.queue.clear()

    def set(self, chunk: Any, routes_SLK: Tensor | None, weights_SLK: Tensor | None = None) -> None:
        """What the routers of `chunk` replay in its next forward: routes (and weights) of `self.layers`, or nothing."""
        for layer, replay in self.by_chunk[id(chunk)].items():
            at = self.layers.index(layer)
            replay.target = None
            if routes_SLK is not None:
                weights = None if weights_SLK is None else self.own_tokens(weights_SLK[:, at])
                replay.target = Target(self.own_tokens(routes_SLK[:, at]).long(), weights)

    @contextmanager
    def recording(self, into: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Inside, routers record what they choose; at the end `into` gets int16 experts and float32 weights, both
        [S, L, K], of each microbatch."""
        for replay in self._all():
            replay.set_router_replay_action(RouterReplayAction.RECORD)
        try:
            yield
            by_layer = {layer: r.recorded for routers in self.by_chunk.values() for layer, r in routers.items()}
            for microbatch in zip(*(by_layer[layer] for layer in self.layers), strict=True):
                experts, weights = (self._all_tokens(torch.stack(part, 1)) for part in zip(*microbatch, strict=True))
                into.append((experts.to(torch.int16), weights))
        finally:
            for replay in self._all():
                replay.clear_router_replay_action()
                replay.recorded = []

    def _all(self) -> list[LayerReplay]:
        return [replay for routers in self.by_chunk.values() for replay in routers.values()]

    def own_tokens(self, rows: Tensor) -> Tensor:
        """This rank's part of what has an entry a token of the microbatch."""
        if not self.config.sequence_parallel:
            return rows
        return rows.chunk(parallel_state.get_tensor_model_parallel_world_size())[
            parallel_state.get_tensor_model_parallel_rank()
        ]

    def _all_tokens(self, rows: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return rows
        parts = [torch.empty_like(rows) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
        dist.all_gather(parts, rows.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return torch.cat(parts)
