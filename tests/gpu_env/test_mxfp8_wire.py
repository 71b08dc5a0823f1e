"""MXFP8's elements and scales are the bytes that vLLM, Transformer Engine and SkyRL make or take."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_env import interpreted  # noqa: F401  # first

import torch  # isort: skip
from torch import Tensor  # isort: skip
from vllm.model_executor.layers.quantization.utils import mxfp8_utils as vllm  # isort: skip

from infra.models import megatron_cpu  # isort: skip
from infra.numerics.mxfp8 import BLOCK, LARGEST, dequantize, quantize, rounded  # isort: skip

ORACLE = Path(sys.prefix) / "oracles/skyrl/backends/skyrl_train/weight_sync/fp8/quantize.py"


def weights(seed: int) -> Tensor:
    """bf16 [256, 192] of every size: normal values, blocks of zeros and of one value, subnormals of E4M3, powers of two and 448s."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(256, 192, generator=generator) * torch.exp2(torch.randint(-30, 30, (256, 1), generator=generator))
    w[3, 32:64], w[4, :32], w[5, :64] = 0.0, 448.0, -0.25
    w[6, :32] *= torch.logspace(-9, 0, 32)
    w[7, 0], w[8, :32] = 3e38, LARGEST * 2.0**-20
    return w.bfloat16()


def theirs_of_vllm(w: Tensor) -> tuple[Tensor, Tensor]:
    return vllm._mxfp8_e4m3_quantize_torch(w)


def skyrl() -> Any:
    if not ORACLE.is_file():
        pytest.skip("skyrl 0.4.0 is not beside this environment: `make gpu-env-check` puts it there")
    spec = importlib.util.spec_from_file_location("skyrl_quantize", ORACLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """Byte by byte, but for the scale of a block of zeros, which stands for nothing."""
    elements, scales = (part.reshape(256, -1) for part in ours)
    their_elements, their_scales = (part.reshape(256, -1) for part in theirs)
    assert torch.equal(elements.view(torch.uint8), their_elements.view(torch.uint8))
    counts = elements.float().view(256, -1, BLOCK).abs().amax(-1) > 0
    assert torch.equal(scales[counts], their_scales[counts])


@pytest.mark.parametrize("seed", range(5))
def test_our_bytes_are_those_of_vllm_and_skyrl(seed: int):
    ours = quantize(weights(seed))
    same(ours, theirs_of_vllm(weights(seed)))
    same(ours, skyrl().mx_cast_to_fp8(weights(seed)))


def test_the_scales_of_vllms_kernel_are_ours():
    """Its elements are the interpreter's: there 31.75 becomes 16 in E4M3 (a carry is lost) and 100 becomes 104 (half goes up)."""
    _, scales = vllm._mxfp8_e4m3_quantize_triton(weights(0).float())
    assert torch.equal(scales, quantize(weights(0))[1])


@pytest.mark.parametrize("seed", range(3))
def test_what_vllm_makes_of_a_version_s_numbers_are_the_version_s_numbers(seed: int):
    """It is handed what elements and scales stand for, and quantises that again: with half the scale and twice the elements where a
    block's largest was rounded down to half of 448, and exactly the same numbers."""
    numbers = dequantize(*quantize(weights(seed)))
    for handed in (numbers, numbers.bfloat16()):
        assert torch.equal(dequantize(*theirs_of_vllm(handed)), numbers)


def test_the_scales_of_blackwells_kernels_are_ours_in_their_order():
    """F8_128x4 (cuBLAS' block scaling factors' layout): tiles of 128 rows x 4 blocks, in each the 32 rows of a quarter side by side."""
    elements, scales = quantize(weights(0))
    blocks = scales.shape[1]
    swizzled = vllm.swizzle_mxfp8_scale(scales, *elements.shape)
    tiles = -(-blocks // 4)
    for row in range(0, 256, 7):
        for block in range(blocks):
            at = ((row // 128) * tiles + block // 4) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
            assert swizzled[at] == scales[row, block]
    assert torch.equal(
        vllm._mxfp8_e4m3_quantize_torch(weights(0), is_sf_swizzled_layout=True)[1].sort()[0], swizzled.sort()[0]
    )


def test_transformer_engines_tensor_takes_both_copies():
    """Blocks along the inputs for y = x w, along the outputs for dx: two roundings of one weight, each with its own scales."""
    megatron_cpu.install()
    import transformer_engine.pytorch  # noqa: F401  # finds its library
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer, MXFP8Tensor

    w = weights(0)
    rows, columns = w.shape
    quantizer = MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3, rowwise=True, columnwise=True)

    def padded(scales: Tensor, columnwise: bool) -> Tensor:
        whole = torch.zeros(quantizer.get_scale_shape(w.shape, columnwise), dtype=torch.uint8)
        whole[: scales.shape[0], : scales.shape[1]] = scales
        return whole

    along_inputs, along_outputs = quantize(w), quantize(w.t().contiguous())
    tensor = MXFP8Tensor(
        shape=w.shape,
        dtype=w.dtype,
        rowwise_data=along_inputs[0].view(torch.uint8),
        rowwise_scale_inv=padded(along_inputs[1], columnwise=False),
        columnwise_data=along_outputs[0].t().contiguous().view(torch.uint8),
        columnwise_scale_inv=padded(along_outputs[1].t(), columnwise=True),
        fp8_dtype=tex.DType.kFloat8E4M3,
        quantizer=quantizer,
        with_gemm_swizzled_scales=False,
        device=w.device,
    )
    assert tensor._rowwise_scale_inv.shape == (256, 8) and tensor._columnwise_scale_inv.shape == (8, 256)
    by_rows = dequantize(
        tensor._rowwise_data.view(torch.float8_e4m3fn), tensor._rowwise_scale_inv[:rows, : columns // BLOCK]
    )
    by_columns = dequantize(
        tensor._columnwise_data.view(torch.float8_e4m3fn).t().contiguous(),
        tensor._columnwise_scale_inv[: rows // BLOCK, :columns].t(),
    ).t()
    assert torch.equal(by_rows.to(w.dtype), rounded(w)) and torch.equal(by_columns.to(w.dtype), rounded(w, 0))
