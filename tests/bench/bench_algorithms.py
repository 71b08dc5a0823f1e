"""Losses, reductions, KL estimates and advantages beside SkyRL 0.4.0's own functions: the largest difference in value and
gradient, in float64 on random batches.

Where a paper's code of theirs draws at random (Clip-Cov) all candidates are drawn. What is left of a difference is theirs:
their ratios are computed in float32 (`safe_exp_delta`), our advantages are stored in it.
"""

import importlib
import subprocess
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.reward.advantage import Rewards, advantage_of, advantages_of
from tasks.reward.config import RewardConfig
from tasks.update.batch import Sample
from tasks.update.config import UpdateConfig
from tasks.update.kl import kl_estimate
from tasks.update.loss import Response, Tokens, policy_loss
from tasks.update.reductions import token_scales
from tests.bench.ours import REPOSITORY

BATCHES = 200
ORACLES = REPOSITORY / "tests" / "bench" / ".oracles"
LOSSES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("ppo_policy_loss", {"clip_eps_high": 0.28}, {"policy_loss_type": "regular", "eps_clip_high": 0.28}),
    "dual_clip": ("ppo_policy_loss", {"c": 1.5}, {"policy_loss_type": "dual_clip", "clip_ratio_c": 1.5}),
    "gspo": ("gspo_policy_loss", {"low": 0.2, "high": 0.2}, {}),
    "cispo": ("compute_policy_loss_cispo", {"low": 0.3, "high": 0.4}, {"cispo": (0.3, 0.4)}),
    "sapo": ("sapo_policy_loss", {}, {"sapo": SimpleNamespace(tau_pos=1.0, tau_neg=1.05)}),
    "dppo_tv": ("dppo_policy_loss", {"divergence": "tv"}, {"dppo": ("binary_tv", 0.1)}),
    "dppo_kl": ("dppo_policy_loss", {"divergence": "kl"}, {"dppo": ("binary_kl", 0.1)}),
    "clip_cov": (
        "compute_policy_loss_clip_cov",
        {"share": 1.0, "low": 0.1, "high": 2.0},
        {"clip_cov": SimpleNamespace(clip_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=2.0)},
    ),
    "kl_cov": (
        "compute_policy_loss_kl_cov",
        {"share": 0.2},
        {"kl_cov": SimpleNamespace(kl_cov_frac=0.2, ppo_kl_coef=1.0)},
    ),
    "importance_sampling": ("importance_sampling_loss", {}, {}),
}
REDUCTIONS = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "fixed": "seq_mean_token_sum_norm",
}
ADVANTAGES = {
    "grpo": "compute_grpo_outcome_advantage",
    "rloo": "compute_rloo_outcome_advantage",
    "maxrl": "compute_maxrl_advantage",
    "reinforce_pp": "compute_reinforce_plus_plus_outcome_advantage",
}


def main() -> dict[str, float]:
    """loss_*, reduction_*, kl_*, advantage_*: the largest difference, over the largest magnitude where that is above 1."""
    theirs = skyrl()
    batches = [list(_batch(seed)) for seed in range(BATCHES)]
    figures = {f"loss_{name}": max(_loss(theirs, name, batch) for batch in batches) for name in LOSSES}
    figures |= {f"reduction_{name}": max(_reduction(theirs, name, batch) for batch in batches) for name in REDUCTIONS}
    figures |= {f"kl_{name}": max(_kl(theirs, name, batch) for batch in batches) for name in ("k1", "k2", "k3")}
    figures |= {
        f"advantage_{name}": max(_advantage(theirs, name, seed) for seed in range(BATCHES)) for name in ADVANTAGES
    }
    return figures | {"batches": BATCHES, "largest_difference": max(figures.values())}


def skyrl() -> Any:
    """Their module of losses and advantages; not what else its packages would start."""
    if not (ORACLES / "skyrl").exists():
        lock = REPOSITORY / "requirements" / "oracles.txt"
        install = [REPOSITORY / ".tools" / "bin" / "uv", "pip", "install", "--quiet", "--python", sys.executable]
        subprocess.run([*install, "--target", ORACLES, "--no-deps", "--require-hashes", "-r", lock], check=True)
    sys.path.append(str(ORACLES))
    for name in ("", ".backends", ".backends.skyrl_train", ".backends.skyrl_train.utils", ".train"):
        package = types.ModuleType(f"skyrl{name}")
        package.__path__ = [str(ORACLES / "skyrl" / name.lstrip(".").replace(".", "/"))]
        sys.modules[package.__name__] = package
    settings: Any = types.ModuleType("skyrl.train.config")
    settings.AlgorithmConfig = object  # an annotation there
    sys.modules[settings.__name__] = settings
    return importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")


def _batch(seed: int) -> Iterator[Response]:
    """Responses of 1 to 20 tokens; their advantages differ from one to the next."""
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(8):
        length = int(torch.randint(1, 21, (1,), generator=drawn))
        old = -torch.randn(length, generator=drawn, dtype=torch.float64).abs() - 0.01
        moved = 0.5 * torch.randn(length, generator=drawn, dtype=torch.float64)
        advantage = torch.randn(1, generator=drawn, dtype=torch.float64)
        yield Response(-(old + moved).abs() - 1e-3, old, advantage.expand(length).clone())


def _padded(batch: list[Response], name: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([getattr(one, name) for one in batch], batch_first=True, padding_value=0.0)


def _mask(batch: list[Response]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.ones_like(one.logprobs) for one in batch], batch_first=True)


def _loss(theirs: Any, name: str, batch: list[Response]) -> float:
    function, ours, settings = LOSSES[name]
    loss = policy_loss(UpdateConfig(loss=name if name[:4] != "dppo" else "dppo", loss_args=ours))
    prepared = torch.cat(loss.prepare(batch, 0)) if loss.prepares else None
    logprobs = torch.cat([one.logprobs for one in batch]).requires_grad_()
    old, advantages = (torch.cat([getattr(one, part) for one in batch]) for part in ("old_logprobs", "advantages"))
    value = loss.tokens(Tokens(logprobs, old, advantages, prepared)).loss.sum()
    (gradient,) = torch.autograd.grad(value, logprobs)
    padded, mask = _padded(batch, "logprobs").requires_grad_(), _mask(batch)
    config = _config(settings)
    expected, _ = getattr(theirs, function)(
        padded, _padded(batch, "old_logprobs"), _padded(batch, "advantages"), config, mask, None
    )
    (slopes,) = torch.autograd.grad(expected, padded)
    return max(_difference(value, expected), _difference(gradient, slopes[mask.bool()]))


def _config(settings: dict[str, Any]) -> Any:
    """Theirs, with what their functions read."""
    values = {"policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0}
    values |= {"loss_reduction": "sequence_mean", "off_policy_correction": None} | settings
    if "cispo" in settings:
        low, high = settings["cispo"]
        values["cispo"] = SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=low, cispo_eps_clip_high=high)
    if "dppo" in settings:
        kind, delta = settings["dppo"]
        values["dppo"] = SimpleNamespace(dppo_type=kind, delta_low=delta, delta_high=delta)
    return SimpleNamespace(**values)


def _reduction(theirs: Any, name: str, batch: list[Response]) -> float:
    sizes = [len(one.logprobs) for one in batch]
    samples = [
        Sample(row, np.zeros(1), np.zeros(n), np.zeros(n), np.ones(n, dtype=bool), np.ones(n))
        for row, n in enumerate(sizes)
    ]
    length = {"reduction_length": 24} if name == "fixed" else {}
    config = UpdateConfig(reduction=name, **length)
    by_row = token_scales(samples, config) or {sample.row: 1 / sum(sizes) for sample in samples}
    scales = [by_row[sample.row] for sample in samples]
    ours = torch.cat([one.advantages * scale for one, scale in zip(batch, scales, strict=True)])
    mask = _mask(batch)
    scaled = theirs.apply_loss_reduction_to_advantages_minibatch(
        _padded(batch, "advantages"), mask, REDUCTIONS[name], len(batch), 24
    )
    return _difference(ours, scaled[mask.bool()])


def _kl(theirs: Any, name: Any, batch: list[Response]) -> float:
    logprobs, old = (torch.cat([getattr(one, part) for one in batch]) for part in ("logprobs", "old_logprobs"))
    logprobs.requires_grad_()
    value, expected = kl_estimate(logprobs, old, name), theirs.compute_approx_kl(logprobs, old, None, name)
    slopes = [torch.autograd.grad(one.sum(), logprobs)[0] for one in (value, expected)]
    return max(_difference(value, expected), _difference(*slopes))


def _advantage(theirs: Any, name: str, seed: int) -> float:
    drawn = np.random.default_rng(seed)
    groups, lengths = np.repeat(np.arange(6), 4), drawn.integers(1, 12, 24)
    values = drawn.integers(0, 2, 24).astype(np.float64) + drawn.random(24)
    settings: dict[str, Any] = {"std_eps": 1e-6} if name == "grpo" else {}
    rewards = Rewards(values, groups, lengths)
    ours = advantages_of(advantage_of(RewardConfig(advantage=name, **settings)), rewards, np.ones(24, dtype=bool))
    mask = (torch.arange(int(lengths.max())) < torch.tensor(lengths).unsqueeze(1)).double()
    token_rewards = torch.zeros_like(mask)
    token_rewards[torch.arange(24), torch.tensor(lengths) - 1] = torch.tensor(values)
    expected, _ = getattr(theirs, ADVANTAGES[name])(
        token_level_rewards=token_rewards, response_mask=mask, index=groups, gamma=1.0
    )
    return _difference(torch.tensor(ours).double(), expected[:, 0])


def _difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / max(1.0, float(theirs.abs().max())))
