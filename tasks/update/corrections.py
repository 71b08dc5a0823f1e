"""Corrections for a policy that samples a little differently than it trains: other kernels, other precision, other experts.

With k = trainer probability / rollout probability of a token, before the update. All work on the step's own logprobs: the
importance ratio that is clipped then compares the trainer with itself, and k enters as a constant weight.

- truncate: weight min(k, high) (truncated importance sampling, TIS; https://fengyao.notion.site/off-policy-rl).
- mask: weight k within [low, high], else 0 (IcePop, arXiv:2510.18855; masked importance sampling, MIS).
- sequence mask: all of a response counts, or nothing of it, by the geometric mean of its k and by its smallest k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infra.errors import BadInput
from tasks.update.config import CorrectionConfig


@dataclass(frozen=True)
class TokenWeights:
    """Weights of N tokens, and how many were changed by what."""

    weight_N: Tensor
    """float32, constant."""
    truncated: float
    masked: float


def token_weights(difference_N: Tensor, config: CorrectionConfig) -> TokenWeights:
    """Weights from log k = `difference_N` (trainer - rollout logprob, nats)."""
    k_N = difference_N.detach().exp()
    if config.tokens == "truncate":
        return TokenWeights(k_N.clamp(max=config.high), (k_N > config.high).sum().item(), 0.0)
    if config.tokens == "mask":
        inside_N = (k_N >= config.low) & (k_N <= config.high)
        return TokenWeights(torch.where(inside_N, k_N, 0.0), 0.0, (~inside_N).sum().item())
    return TokenWeights(torch.ones_like(k_N), 0.0, 0.0)


def check_mismatch(k3: float, config: CorrectionConfig) -> None:
    """Raises BadInput when a step's mean k3 is above `config.max_k3`: its rollouts are not this policy's."""
    if config.max_k3 is not None and k3 > config.max_k3:
        raise BadInput(
            f"scored batch: mean k3 of the rollouts to the trainer is {k3:.3g}, update.correction.max_k3 is "
            f"{config.max_k3:g}; engine and trainer do not hold one policy, and nothing was applied. See what differs "
            "(precision, temperature, routes), or start a run with another limit"
        )


def kept_sequences(differences: Sequence[Tensor], config: CorrectionConfig) -> list[bool]:
    """Which responses count; `differences`: log k of each one's loss tokens. A response without any counts."""
    return [len(d) == 0 or _keeps(d, config) for d in differences]


def _keeps(difference_R: Tensor, config: CorrectionConfig) -> bool:
    mean = difference_R.mean().exp().item()
    smallest = difference_R.min().exp().item()
    return config.sequence_low <= mean <= config.sequence_high and smallest >= config.sequence_veto
