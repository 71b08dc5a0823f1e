"""Balancing of experts without an auxiliary loss: a router's correction bias moves against its experts' load
(arXiv:2408.15664). The bias chooses experts and weighs none, so it has no gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias


def forget_load(gpts: Sequence[Any]) -> None:
    """Start counting the tokens of each expert anew."""
    for router in _routers(gpts):
        router.local_tokens_per_expert.zero_()


@torch.no_grad()
def balance(gpts: Sequence[Any], rate: float) -> None:
    """Raise by `rate` the bias of every expert that had fewer of the step's tokens than the mean, lower the others'.

    Tokens of all processes count, as they were routed (or replayed); padding does not.
    """
    routers = _routers(gpts)
    if rate == 0 or not routers:
        return
    load = torch.stack([router.local_tokens_per_expert for router in routers])
    bias = torch.stack([router.expert_bias for router in routers])
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    for router, updated in zip(routers, get_updated_expert_bias(load, bias, rate, group), strict=True):
        router.expert_bias.copy_(updated)


def _routers(gpts: Sequence[Any]) -> list[Any]:
    modules = [module for gpt in gpts for module in gpt.modules()]
    return [module for module in modules if getattr(module, "expert_bias", None) is not None]
