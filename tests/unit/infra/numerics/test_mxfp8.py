"""MXFP8's rounding against exact rational arithmetic; tests/integration/test_mxfp8.py compares with vLLM's own."""

from bisect import bisect_left
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from infra.errors import BadInput
from infra.numerics.mxfp8 import (
    BLOCK,
    Mxfp8Config,
    dequantize,
    dequantize_tensors,
    quantize,
    quantize_tensors,
    quantized_names,
    rounded,
)

E4M3 = sorted(
    {
        sign * Fraction(m, 8) * Fraction(2) ** (e - 7 if e else -6)
        for e in range(16)
        for sign in (1, -1)
        for m in ((range(8, 16) if e else range(8)) if e < 15 else range(8, 15))
    }
)
"""Every finite value of E4M3 (bias 7, subnormals below 2**-6; S.1111.111 is NaN), from its definition."""


def nearest_even(value: Fraction) -> Fraction:
    above = bisect_left(E4M3, value)
    pair = E4M3[max(above - 1, 0) : above + 1]
    # Of a tie the even one counts: neighbours alternate, and zero is even.
    return min(pair, key=lambda c: (abs(value - c), (E4M3.index(c) - E4M3.index(Fraction(0))) % 2))


def by_definition(block: list[float]) -> list[float]:
    exact = [Fraction(value) for value in block]
    exponent = -127
    while exponent < 127 and max(map(abs, exact)) > 448 * Fraction(2) ** exponent:
        exponent += 1
    return [float(nearest_even(value / Fraction(2) ** exponent) * Fraction(2) ** exponent) for value in exact]


def test_e4m3_is_as_torch_has_it():
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert sorted(set(bits[~bits.isnan()].tolist())) == [float(value) for value in E4M3]


numbers = (
    st.floats(-1e4, 1e4, width=32)
    | st.floats(-(2.0**-9), 2.0**-9, width=32)
    | st.sampled_from([0.0, 448.0, 464.0, 2.0**-126, 2.0**127])
)


@settings(max_examples=30)
@given(st.lists(numbers, min_size=BLOCK, max_size=BLOCK))
def test_rounding_is_exact(block: list[float]):
    x = torch.tensor(block, dtype=torch.float32)
    expected = torch.tensor(by_definition(x.tolist()), dtype=torch.float32)
    assert torch.equal(dequantize(*quantize(x)), expected)
    assert torch.equal(rounded(x), expected)


def test_the_scale_is_the_smallest_power_of_two_that_saturates_nothing():
    x = torch.zeros(5, BLOCK)
    x[:, 3] = torch.tensor([448.0, torch.nextafter(torch.tensor(448.0), torch.tensor(500.0)).item(), 1.0, 0.0, 1.75])
    elements, scales = quantize(x)
    assert (scales[:, 0].int() - 127).tolist() == [0, 1, -8, -127, -8]
    assert elements[:, 3].float().tolist() == [448, 224, 256, 0, 448]


def test_blocks_lie_along_the_asked_dimension_and_a_short_one_is_padded():
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([x, torch.zeros(14, 64)])
    assert torch.equal(rounded(x, dim=0), dequantize(*quantize(padded.t().contiguous())).t()[:50])
    assert torch.equal(rounded(x.bfloat16()), rounded(x.bfloat16().float()).bfloat16())


def test_what_is_rounded_stays_as_it_is():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    once = rounded(x)
    assert torch.equal(rounded(once), once) and torch.equal(dequantize(*quantize(once)), once)
    assert torch.equal(once.bfloat16().float(), once), "exact in bf16: an engine may hold it so"


SHAPES = {
    "model.embed_tokens.weight": (512, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.mlp.gate.weight": (8, 64),
    "model.layers.0.mlp.experts.0.down_proj.weight": (64, 96),
    "lm_head.weight": (512, 64),
}


def test_routers_norms_embeddings_and_head_stay_in_high_precision():
    attention = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    expert = "model.layers.0.mlp.experts.0.down_proj.weight"
    assert quantized_names(SHAPES, Mxfp8Config()) == [*attention, expert]
    defaults = Mxfp8Config().high_precision
    assert quantized_names(SHAPES, Mxfp8Config(high_precision=(*defaults, "*.self_attn.*"))) == [expert]


@pytest.mark.parametrize(
    ("patterns", "shapes", "message"),
    [
        (("*.q_proj",), {}, "q_proj, k_proj, v_proj are one matrix"),
        (("*.layers.7.*",), {}, "'*.layers.7.*' matches no module"),
        (("*",), {}, "nothing is left to quantise"),
        ((), {"model.layers.0.mlp.experts.0.down_proj.weight": (64, 48)}, "divisible by 32"),
    ],
)
def test_bad_settings_are_named(patterns: tuple, shapes: dict, message: str):
    with pytest.raises(BadInput, match=message.replace("*", r"\*")):
        quantized_names(SHAPES | shapes, Mxfp8Config(high_precision=(*Mxfp8Config().high_precision, *patterns)))


def test_a_version_s_elements_and_scales_become_its_numbers_again():
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    names = quantized_names(SHAPES, Mxfp8Config())
    version = dict(quantize_tensors(tensors.items(), names))
    assert {n for n, t in version.items() if t.dtype == torch.float8_e4m3fn} == set(names)
    back = dict(dequantize_tensors(version.items()))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], rounded(tensor) if name in names else tensor), name
    with pytest.raises(BadInput, match="without scales"):
        dict(dequantize_tensors((n, t) for n, t in version.items() if not n.endswith("k_proj.weight_scale")))
