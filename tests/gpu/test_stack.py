"""The GPU stack: it imports, its kernels are there, and nothing of what stands in for it on the CPU is."""

import importlib

import pytest
import torch

from infra.models import megatron_cpu

pytestmark = pytest.mark.gpu(cpu=False)
PACKAGES = [
    "vllm._custom_ops",
    "flashinfer",
    "triton",
    "transformer_engine.pytorch",
    "megatron.core",
    "megatron.bridge",
    "fla",
]
"""In the order in which a fault of one would show in the next."""


@pytest.mark.parametrize("package", PACKAGES)
def test_it_imports(package: str):
    megatron_cpu.install()  # as the trainer does, before megatron
    importlib.import_module(package)


def test_cuda_is_not_answered_by_the_cpu_s_stand_ins():
    megatron_cpu.install()
    from megatron.core.extensions.transformer_engine import HAVE_TE

    assert torch.cuda.current_device() == 0 and isinstance(torch.cuda.Stream(), torch.Stream)
    assert torch.zeros(1).cuda().is_cuda and torch.nn.Linear(1, 1).cuda().weight.is_cuda
    with megatron_cpu.cuda_means_cpu():
        assert torch.zeros(1, device="cuda").is_cuda
    assert HAVE_TE


def test_vllm_is_the_one_for_cuda():
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    assert current_platform.is_cuda()
    x, weight = torch.randn(5, 64, device="cuda"), torch.rand(64, device="cuda")
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-6)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, [64], weight, 1e-6))


def test_transformer_engine_multiplies():
    import transformer_engine.pytorch as te

    layer = te.Linear(64, 96, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(layer(x), x @ layer.weight.t(), rtol=2e-2, atol=2e-2)
    assert x.grad is not None and layer.weight.grad is not None
