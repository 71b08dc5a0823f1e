"""Corrections in whole updates: rollouts that differ from the trainer by known amounts, and what numpy makes of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tasks.update.config import CorrectionConfig, UpdateConfig
from tests.integration.test_trainer import VOCABULARY, gradients, make_trainer
from tests.support.models import write_tiny_llama

BAND = {"low": 0.5, "high": 2.0}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncate": {"tokens": "truncate", **BAND},
    "mask": {"tokens": "mask", **BAND},
    "sequences": {"sequences": "mask"},
    "mask and sequences": {"tokens": "mask", "sequences": "mask", **BAND},
}
SKIPPED = 4
"""The row whose advantage is 0: it is not trained on."""


@dataclass
class Shifted:
    """A batch on policy, but for log k."""

    batch: pa.Table
    log_k: list[np.ndarray]
    """Of each row's loss tokens: trainer's less rollout's logprob, nats."""


def log_k(kind: int, tokens: int) -> np.ndarray:
    """0: none. 1: all tokens a little likelier in the trainer. 2: tokens beyond the band, in the mean none. 3: the same with
    one token that the trainer would hardly have sampled."""
    if kind == 3:
        return np.array([-10.0, *np.full(tokens - 1, 10 / (tokens - 1))])
    shifts = {0: np.zeros(tokens), 1: np.full(tokens, 0.3), 2: 0.9 * (-1.0) ** np.arange(tokens)}[kind]
    if kind == 2 and tokens % 2:
        shifts[-1] = 0.0
    return shifts


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def shifted(llama: Path) -> Shifted:
    """3 prompts with a response of each kind, some of whose tokens count for nothing."""
    rng, trainer = np.random.default_rng(0), make_trainer(llama)
    rows, shifts = [], []
    for _ in range(3):
        prompt = rng.integers(0, VOCABULARY, rng.integers(2, 12)).tolist()
        for kind in range(4):
            response = rng.integers(0, VOCABULARY, rng.integers(5, 9)).tolist()
            mask = np.ones(len(response), dtype=bool)
            mask[rng.integers(len(response))] = kind == 0
            (own,) = trainer.token_logprobs([prompt + response])
            logprobs = np.array(own[len(prompt) - 1 :])
            shifts.append(log_k(kind, mask.sum()))
            logprobs[mask] -= shifts[-1]
            logprobs[~mask] = np.nan
            advantage = 0.0 if len(rows) == SKIPPED else float(rng.choice([-1, 1]) * rng.uniform(0.5, 2))
            rows.append(
                {
                    "prompt_ids": prompt,
                    "response_ids": response,
                    "logprobs": logprobs.tolist(),
                    "loss_mask": mask.tolist(),
                    "advantage": advantage,
                }
            )
    return Shifted(pa.Table.from_pylist(rows), shifts)


def by_hand(shifted: Shifted, config: UpdateConfig) -> tuple[dict[str, float], list[np.ndarray]]:
    """(metrics, d loss / d logprob of each row's loss tokens), in numpy, row by row."""
    correction = config.correction
    total = sum(map(len, shifted.log_k))
    tokens: dict[str, list[np.ndarray]] = {
        n: [] for n in ("loss", "k", "k3", "weight", "truncated", "masked", "clipped")
    }
    slopes, dropped = [], 0
    for row, x in zip(shifted.batch.to_pylist(), shifted.log_k, strict=True):
        advantage, k = row["advantage"], np.exp(x)
        if advantage == 0:
            slopes.append(np.zeros(len(x)))
            continue
        weight = np.ones(len(x))
        if correction.tokens == "truncate":
            weight = np.minimum(k, correction.high)
        elif correction.tokens == "mask":
            weight = np.where((k < correction.low) | (k > correction.high), 0, k)
        if correction.sequences == "mask":
            mean = np.prod(k) ** (1 / len(k))
            counts = correction.sequence_low <= mean <= correction.sequence_high and k.min() >= correction.sequence_veto
            weight, dropped = weight * counts, dropped + (not counts)
        ratio = np.ones(len(x)) if correction.tokens != "none" else k
        clipped = np.clip(ratio, 1 - config.clip_eps_low, 1 + config.clip_eps_high)
        stopped = (ratio * advantage > clipped * advantage) & (weight > 0)
        slopes.append(np.where(stopped, 0, -advantage * weight * ratio) / total)
        for name, values in {
            "loss": -np.minimum(ratio * advantage, clipped * advantage) * weight / total,
            "k": k,
            "k3": k - 1 - x,
            "weight": weight,
            "truncated": (k > correction.high) * (correction.tokens == "truncate"),
            "masked": weight == 0,
            "clipped": stopped,
        }.items():
            tokens[name].append(values)
    of = {name: np.concatenate(values) for name, values in tokens.items()}
    return {
        "loss": of["loss"].sum(),
        "policy_loss": of["loss"].sum(),
        "loss_tokens": total,
        "skipped_samples": 1,
        "ratio_mean": of["k"].mean(),
        "ratio_max": of["k"].max(),
        "k3_mean": of["k3"].mean(),
        "logprob_diff_max": 10,
        "correction_weight_mean": of["weight"].mean(),
        "truncated_fraction": of["truncated"].mean(),
        "masked_fraction": of["masked"].mean(),
        "masked_sequences": dropped,
        "clip_fraction": of["clipped"].mean(),
    }, slopes


def plain_gradient(folder: Path, batch: pa.Table, slopes: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """The gradient of a loss with these slopes: transformers, each sample alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row, slope in zip(batch.to_pylist(), slopes, strict=True):
        prompt, response, mask = row["prompt_ids"], row["response_ids"], torch.tensor(row["loss_mask"])
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(len(response)), response]
        (logprobs[mask] * torch.from_numpy(slope).float()).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_metrics_and_gradient_are_those_by_hand(llama: Path, shifted: Shifted, name: str):
    trainer = make_trainer(llama, microbatch_tokens=40, correction=CORRECTIONS[name])
    expected, slopes = by_hand(shifted, trainer.config)
    found = gradients(trainer, shifted.batch)
    metrics = trainer.update(shifted.batch)  # the weights have not changed
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    gradient = plain_gradient(llama, shifted.batch, slopes)
    assert gradient.keys() == found.keys()
    for key, tensor in gradient.items():
        assert (found[key] - tensor).norm() <= 1e-4 * tensor.norm(), key


def test_the_batch_has_tokens_and_responses_of_every_fate(shifted: Shifted):
    fates = {
        name: by_hand(shifted, UpdateConfig(correction=CorrectionConfig(**c)))[0] for name, c in CORRECTIONS.items()
    }
    assert 0.2 < fates["truncate"]["truncated_fraction"] < 0.8
    assert 0.2 < fates["mask"]["masked_fraction"] < fates["mask and sequences"]["masked_fraction"] < 0.9
    assert fates["sequences"]["masked_sequences"] == 6, "kinds 1 and 3 of three prompts"
    assert fates["truncate"]["masked_sequences"] == fates["truncate"]["masked_fraction"] == 0
