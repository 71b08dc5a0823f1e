"""MXFP8 (OCP Microscaling Formats v1.0): E4M3 elements that share one E8M0 scale for each 32 along the contraction axis.

The scale is the smallest power of two that brings the block's largest magnitude within E4M3's range (448), as in
TransformerEngine's recipe and in vLLM; elements are rounded to nearest, ties to even. Everything here is exact arithmetic
on the CPU or a GPU: what a device with MXFP8 units multiplies, in higher precision.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pydantic import Field

from infra.config import Config
from infra.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
LARGEST = 448.0
"""E4M3's largest value."""
SCALE = "_scale"
"""A quantised tensor `X.weight` [out, in] (float8_e4m3fn) comes with `X.weight_scale` [out, in / 32] (uint8, 127 + exponent)."""

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that Megatron and vLLM hold as one matrix."""
_SPLIT_ALONG_INPUTS = ("o_proj", "down_proj")
"""Projections whose inputs tensor parallelism splits; of all others it splits the outputs."""


class Mxfp8Config(Config):
    """MXFP8 training and sampling: what `precision: mxfp8` means in detail."""

    high_precision: tuple[str, ...] = ("*embed_tokens", "lm_head", "*norm", "*.mlp.gate", "*router")
    """Modules that stay in bf16 or fp32, as patterns over the checkpoint's module names. Add "*.layers.0.*" for a layer, or
    "*.down_proj" for a kind (on GPUs: whole layers at the start and the end only). Optimizer, attention scores and softmax
    are never quantised."""
    emulation: bool = False
    """Compute MXFP8's numbers in fp32, exactly rounded, where the device has no MXFP8 units (any CPU). Slower than fp32."""
    train: bool = True
    """Off: rollouts in MXFP8, forward and backward of the update in bf16."""
    sequence_multiple: int = Field(BLOCK, ge=BLOCK, multiple_of=BLOCK)
    """A microbatch is padded to a multiple of this many tokens on each device where the kernels need it (GPUs); the tokens of
    an expert to a multiple of 32."""


def scale_exponents(x: "Tensor") -> "Tensor":
    """int32 [..., n / 32]: the exponent of each block of the last dimension (n divisible by 32), -127 to 127."""
    import torch

    amax = x.detach().float().unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    mantissa, exponent = torch.frexp(amax / LARGEST)  # = mantissa * 2**exponent with mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(amax == 0, -127, exponent).clamp(-127, 127).to(torch.int32)


def quantize(x: "Tensor") -> "tuple[Tensor, Tensor]":
    """(elements float8_e4m3fn, x's shape; scales uint8 [..., n / 32]), blocks along the last dimension.

    BadInput when the last dimension is not divisible by 32.
    """
    import torch

    _check(x.shape[-1])
    exponents = scale_exponents(x)
    scaled = torch.ldexp(x.detach().float().unflatten(-1, (-1, BLOCK)), -exponents.unsqueeze(-1))
    elements = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).flatten(-2)
    return elements, (exponents + 127).to(torch.uint8)


def dequantize(elements: "Tensor", scales: "Tensor") -> "Tensor":
    """float32: what the pair stands for. Exact, also in bfloat16 unless a scale is extreme."""
    import torch

    blocks = elements.float().unflatten(-1, (-1, BLOCK))
    return torch.ldexp(blocks, scales.to(torch.int32).unsqueeze(-1) - 127).flatten(-2)


def rounded(x: "Tensor", dim: int = -1) -> "Tensor":
    """x as MXFP8 has it, in x's dtype, blocks along `dim` (a last block that is not full is padded with zeros).

    The same values as dequantize(*quantize(x)), without making the elements.
    """
    import torch

    moved = x.detach().movedim(dim, -1)
    length = moved.shape[-1]
    if missing := -length % BLOCK:
        moved = torch.nn.functional.pad(moved, (0, missing))
    blocks = moved.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax / LARGEST)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp_(-127, 127)
    one = torch.ones_like(amax)  # powers a block: ldexp of the elements would take eight times as long
    scaled = blocks * torch.ldexp(one, -exponent)
    elements = scaled.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    scale = torch.where(amax.isnan(), amax, torch.ldexp(one, exponent))  # a NaN is its whole block's
    return _floats(elements).mul_(scale).flatten(-2)[..., :length].movedim(-1, dim).to(x.dtype)


def _floats(elements: "Tensor") -> "Tensor":
    """float32 of E4M3 elements that are no NaNs: sign, exponent and mantissa moved to fp32's places, and the exponent's bias
    made up for. Exact, subnormals too, and nine times as fast as torch's conversion on a CPU."""
    import torch

    bits = elements.view(torch.int8).to(torch.int32).bitwise_left_shift_(20)  # the sign is in the five highest bits
    return bits.bitwise_and_(-(2**31) + 0x07F00000).view(torch.float32).mul_(2.0**120)


def _check(size: int) -> None:
    if size % BLOCK:
        raise BadInput(f"MXFP8: a dimension of {size} is not divisible by {BLOCK}")


def quantized_names(shapes: Mapping[str, tuple[int, ...]], config: Mxfp8Config) -> list[str]:
    """The checkpoint's tensors that MXFP8 holds quantised: all matrices but those of `high_precision`.

    BadInput when a dimension of one is not divisible by 32 (both are contracted: forward, and backward), when one is an
    embedding, a head or a router, when patterns part what is held as one matrix, when one matches nothing, or when nothing is
    left to quantise.
    """
    modules = {name.removesuffix(".weight"): name for name, shape in shapes.items() if name.endswith(".weight")}
    for pattern in config.high_precision:
        default = pattern in Mxfp8Config.model_fields["high_precision"].default
        if not default and not any(_matches(module, pattern) for module in modules):
            raise BadInput(f"mxfp8.high_precision: {pattern!r} matches no module of the model")
    names = [
        name
        for module, name in modules.items()
        if len(shapes[name]) == 2 and not any(_matches(module, pattern) for pattern in config.high_precision)
    ]
    if not names:
        raise BadInput("mxfp8.high_precision: it matches every matrix, nothing is left to quantise")
    for name in names:
        module = name.removesuffix(".weight")
        for pattern in Mxfp8Config.model_fields["high_precision"].default:
            if _matches(module, pattern):
                raise BadInput(
                    f"mxfp8.high_precision: it replaces the default, and {module} is none of the linear layers and experts that "
                    f'can be in MXFP8; add "{pattern}"'
                )
        if any(size % BLOCK for size in shapes[name]):
            raise BadInput(
                f"precision mxfp8: {name} is {list(shapes[name])}, and both dimensions must be divisible by {BLOCK}; "
                f'add "{name.removesuffix(".weight")}" to mxfp8.high_precision'
            )
    _check_fused(set(names), shapes)
    return names


def check_shards(
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    setting: str,
    size: int,
    expert_size: int,
    outputs: bool,
) -> None:
    """BadInput when tensor parallelism cuts blocks: a rank would scale what it has of them otherwise than a version does.

    `names`: the quantised tensors; `size`: processes that `setting` splits each over, and `expert_size` an expert's;
    `outputs`: whether outputs are contracted too, as a backward pass does.
    """
    for name in names:
        ranks = expert_size if ".experts." in name else size
        along_inputs = name.removesuffix(".weight").rpartition(".")[2] in _SPLIT_ALONG_INPUTS
        length = shapes[name][1 if along_inputs else 0]
        if length % (ranks * BLOCK) and (along_inputs or outputs):
            fits = [str(n) for n in range(1, 65) if length % (n * BLOCK) == 0]
            raise BadInput(
                f"precision mxfp8, {setting} {size}: the {length} {'inputs' if along_inputs else 'outputs'} of {name} "
                f"make {ranks} shards of {length / ranks:g}, and blocks are of {BLOCK}; it can be split over "
                f"{', '.join(fits)}"
            )


def _matches(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern)


def _check_fused(names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in names:
        for group in _FUSED:
            part = next((part for part in group if name.endswith(f".{part}.weight")), None)
            others = [re.sub(rf"{part}\.weight$", f"{other}.weight", name) for other in group] if part else []
            if not all(other in shapes for other in others):
                continue  # a gate_proj that is no MLP's (an attention's gate) stands alone
            if missing := [other for other in others if other not in names]:
                raise BadInput(
                    f"mxfp8.high_precision: it names {missing[0]} but not {name}; {', '.join(group)} are one matrix "
                    "in Megatron and in vLLM: name all of them"
                )


def quantize_tensors(tensors: "Iterable[tuple[str, Tensor]]", names: Iterable[str]) -> "Iterator[tuple[str, Tensor]]":
    """A policy's tensors with those of `names` as elements and scales: what a version holds."""
    chosen = set(names)
    for name, tensor in tensors:
        if name in chosen:
            elements, scales = quantize(tensor)
            yield name, elements
            yield name + SCALE, scales
        else:
            yield name, tensor


def dequantize_tensors(tensors: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
    """Undoes `quantize_tensors`: float32 where there were elements and scales. BadInput names what lacks its scales."""
    import torch

    elements: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if tensor.dtype == torch.float8_e4m3fn:
            elements[name] = tensor
        elif name.endswith(".weight" + SCALE):
            scales[name.removesuffix(SCALE)] = tensor
        else:
            yield name, tensor
        for ready in elements.keys() & scales.keys():
            yield ready, dequantize(elements.pop(ready), scales.pop(ready))
    if left := sorted(elements.keys() ^ scales.keys()):
        raise BadInput(f"policy tensor {left[0]!r}: its elements came without scales, or its scales without elements")
