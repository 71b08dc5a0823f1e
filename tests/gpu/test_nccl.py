"""A trainer over two devices of this machine, NCCL between them: it trains as one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.device import DEVICE, ON_CPU
from tests.gpu.trainers import apart, bf16, probed, trainer
from tests.integration.beam.test_trainer import scored
from tests.support import tiny_models

pytestmark = pytest.mark.gpu(devices=2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data and experts": {"data": 2, "expert": 2},
    "tensor": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "one": {},  # last: a trainer alone keeps its process group
}


def sum_of_ranks(one: Any) -> tuple[float, str]:
    """In each process: 1 + 2, summed where the weights are; and where that is."""
    ranks = torch.full((1024,), one.rank + 1.0, device=next(iter(one.model.parameters().values())).device)
    dist.all_reduce(ranks)
    return ranks[0].item(), str(ranks.device)


def test_two_devices_train_as_one(tmp_path: Path):
    folder = bf16(tiny_models.beam, tmp_path)
    found: dict[str, tuple[dict[str, float], Any, Any]] = {}
    for name, parallel in LAYOUTS.items():
        made = trainer(folder, parallel=parallel)
        if parallel:
            sums = made.each(sum_of_ranks)
            assert [total for total, _ in sums] == [3.0, 3.0], name
            assert ON_CPU or {device for _, device in sums} == {"cuda:0", "cuda:1"}
            assert ON_CPU or "nccl" in str(dist.get_backend_config())
        before = probed(made)
        found[name] = (made.update(scored()), before, probed(made))
        made.close()
    metrics, before, after = found.pop("one")
    assert apart(before, after) > 0.01, f"on {DEVICE} a step changes the policy"
    for name, (theirs, start, end) in found.items():
        for key in ("loss", "grad_norm", "entropy", "k3_mean"):
            assert theirs[key] == pytest.approx(metrics[key], rel=0.05, abs=2e-3), f"{name}: {key}"
        assert apart(start, before) < 0.01, name
        assert apart(end, after) < 0.2 * apart(before, after), name
