"""Beam's arithmetic, written once for transformers and Megatron: what is computed in fp32, and where it rounds.

Each function takes activations in the model's dtype and returns that dtype, having rounded once; only the residual sum
rounds in between, because the published kernels do. Shapes: H query heads, K head_dim, E experts, any leading dims.
"""

import math

import torch
from torch import Tensor

from infra.models.beam.config import BeamConfig

SSMAX_SCALE, SSMAX_POWER = 2048, 0.1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE with halves as pairs (neox). x [..., T, H, K], positions [..., T] -> [..., T, H, K]"""
    size = x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, device=x.device).float() / size)
    angles = (positions[..., None].float() * frequencies).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def ssmax(q: Tensor, positions: Tensor) -> Tensor:
    """q * (1 + (position + 1) / 2048) ** 0.1: full layers know position by sharpness only. q [..., T, H, K]"""
    scale = (1 + (positions.float() + 1) / SSMAX_SCALE) ** SSMAX_POWER
    return (q.float() * scale[..., None, None]).to(q.dtype)


def output_gate(attention: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """attention * sigmoid(gate + bias of the head). attention and gate [..., H, K], bias [H]"""
    return (attention.float() * torch.sigmoid(gate.float() + bias.float()[:, None])).to(attention.dtype)


def residual_scales(layer: int, is_attention: bool) -> tuple[float, float]:
    """(X, R) of h = R * h + X * y for the 0-based layer: 1/sqrt(n) and sqrt(n-1)/sqrt(n), n the adds up to this one."""
    n = 2 * (layer + 1) + (0 if is_attention else 1)
    return 1 / math.sqrt(n), math.sqrt(n - 1) / math.sqrt(n)


def residual_add(h: Tensor, y: Tensor, scales: tuple[float, float]) -> Tensor:
    """R * h + X * y; in bf16 both products round before they are added, and the sum rounds again."""
    x, r = scales
    return r * h + x * y


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap) in fp32; untouched where there is no cap."""
    return logits if cap is None else cap * torch.tanh(logits.float() / cap)


def choose_experts(scores: Tensor, topk: int, n_group: int | None, topk_group: int | None) -> Tensor:
    """The ids [N, topk] of each token's experts. scores [N, E]: sigmoid scores plus correction bias.

    With both group numbers set, only experts of the topk_group best groups stay; a group's score is the sum of its two
    best. Megatron's own grouped top-k sums its topk // topk_group best, which is not the same for every Beam.
    """
    if n_group and topk_group:
        groups = scores.unflatten(-1, (n_group, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(topk_group, -1).indices
        stays = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best, True)
        scores = groups.masked_fill(~stays[..., None], float("-inf")).flatten(-2)
    return scores.topk(topk, -1).indices


def expert_weights(scores: Tensor, norm_topk_prob: bool, scaling: float) -> Tensor:
    """The weights of the chosen experts, fp32, from their sigmoid scores without the bias. [N, topk] -> [N, topk]"""
    if norm_topk_prob:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores * scaling


def route(logits: Tensor, bias: Tensor, config: BeamConfig) -> tuple[Tensor, Tensor]:
    """(weights [N, topk] fp32, expert ids [N, topk] int64) from router logits [N, E] fp32 and correction bias [E] fp32."""
    scores = torch.sigmoid(logits)
    with torch.no_grad():
        chosen = choose_experts(scores + bias, config.num_experts_per_tok, config.n_group, config.topk_group)
    return expert_weights(scores.gather(-1, chosen), config.norm_topk_prob, config.routed_scaling_factor), chosen
