"""Settings that cannot work are refused with what would."""

import pydantic
import pytest
import torch

from tasks.update.config import ParallelConfig, UpdateConfig
from tasks.update.precision import resolve_precision


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 1e-5}, "learning_rate"),
        ({"lr": 0}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas must lie in"),
        ({"clip_eps_low": 1.0}, "clip_eps_low"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"parallel": {"sequence": True}}, "needs parallel.tensor > 1"),
        ({"parallel": {"expert": 2}}, r"expert 2 does not divide .* = 1 x 1, .*; parallel\.data 2 fits"),
        ({"parallel": {"expert": 8, "tensor": 2, "data": 5}}, r"expert 8 does not divide .* = 2 x 5, .*data 8 fits"),
        ({"precision": "bfloat16", "weights": "float32"}, "leave weights at auto or bfloat16"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        UpdateConfig.model_validate(settings)


def test_every_setting_is_documented():
    assert all(field.description for field in UpdateConfig.model_fields.values())


@pytest.mark.parametrize(("has_units", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_precision_auto_takes_bf16_only_where_the_device_multiplies_it(monkeypatch, has_units, dtype):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_units)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    assert resolve_precision("auto") == dtype
    assert resolve_precision("bfloat16") == torch.bfloat16


@pytest.mark.parametrize(
    ("sizes", "processes", "expert_tensor"),
    [
        ({}, 1, 1),
        ({"tensor": 2}, 2, 2),
        ({"data": 2}, 2, 1),
        ({"data": 4, "expert": 2}, 4, 1),
        ({"tensor": 2, "pipeline": 2, "expert": 2, "sequence": True}, 4, 1),
    ],
)
def test_processes_are_pipeline_x_tensor_x_data(sizes, processes, expert_tensor):
    parallel = ParallelConfig.model_validate(sizes)
    assert (parallel.processes, parallel.expert_tensor) == (processes, expert_tensor)
    assert processes % (parallel.pipeline * parallel.expert * parallel.expert_tensor) == 0, "as Megatron wants it"
