"""MXFP8 in the trainer: TransformerEngine's recipe on GPUs that have it, the same numbers in fp32 elsewhere.

A linear layer's three products, each contracted over blocks of 32 (y: outputs, x: inputs, T tokens, O and I features):
y_TO = x_TI w_OI over I;  dx_TI = dy_TO w_OI over O;  dw_OI = dy_TO^T x_TI over T. So x, w and dy are rounded twice, along
either of their dimensions. Products and sums are fp32 here, as TransformerEngine's accumulators are.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infra.errors import BadInput
from infra.numerics.mxfp8 import Mxfp8Config, rounded
from tasks.update.model import PolicyModel


class Mxfp8Products(torch.autograd.Function):
    """x [..., I] and w [O, I] -> [..., O], all three products in MXFP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weights: "RoundedWeight", group: Any) -> Tensor:
        """`weights`: what `weight` is in MXFP8; `group`: ranks whose dx are to be summed (tensor parallelism), or None."""
        ctx.weights, ctx.group = weights, group
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight_dtype = weight.dtype
        return rounded(x) @ weights.along_inputs.t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The gradients of x and w; w's only where it is trained."""
        (grad,) = grad_outputs
        (x,) = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = rounded(grad) @ ctx.weights.along_outputs
            if ctx.group is not None:
                dist.all_reduce(dx, group=ctx.group)
        if ctx.needs_input_grad[1]:
            grad_TO, x_TI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            dw = (rounded(grad_TO, dim=0).t() @ rounded(x_TI, dim=0)).to(ctx.weight_dtype)
        return dx, dw, None, None


class RoundedWeight:
    """A weight in MXFP8 along its inputs (forward) and along its outputs (backward), made anew when it has changed."""

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._forward: Tensor | None = None
        self._backward: Tensor | None = None

    def of(self, weight: Tensor) -> "RoundedWeight":
        """For this weight as it is now."""
        key = (weight.data_ptr(), weight._version)
        if key != self._key:
            self._key, self._weight, self._forward, self._backward = key, weight.detach(), None, None
        return self

    def forget(self) -> None:
        """The weight has changed in a way that torch does not count (`weight.data`)."""
        self._key = self._forward = self._backward = None

    @property
    def along_inputs(self) -> Tensor:
        """Blocks along I."""
        if self._forward is None:
            self._forward = rounded(self._weight)
        return self._forward

    @property
    def along_outputs(self) -> Tensor:
        """Blocks along O."""
        if self._backward is None:
            self._backward = rounded(self._weight, dim=0)
        return self._backward


def check_device(config: Mxfp8Config) -> None:
    """BadInput when this process's device has no MXFP8 units and no emulation was asked for, or cannot emulate."""
    if not torch.cuda.is_available():
        if not config.emulation:
            raise BadInput("precision mxfp8: this machine has no GPU with MXFP8 units; set mxfp8.emulation: true")
        return
    name, (major, _) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if config.emulation:
        raise BadInput(f"mxfp8.emulation: it replaces Megatron's portable layers, not those on {name}; turn it off")
    if major < 10:
        raise BadInput(f"precision mxfp8: {name} has no MXFP8 units (Blackwell and later do)")


def megatron_settings(config: Mxfp8Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Megatron's settings for TransformerEngine's MXFP8 recipe (GPU), of a model whose checkpoint has `shapes`; none to
    emulate.

    TransformerEngine quantises every linear layer; what else `high_precision` may name are whole layers at either end.
    """
    if config.emulation or not config.train:
        return {}
    start, end = _whole_layers(config, count_layers(shapes))
    settings = {
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param": False,  # masters and what is committed are quantised from the weights themselves
        "first_last_layers_bf16": bool(start or end),
        "num_layers_at_start_in_bf16": start,
        "num_layers_at_end_in_bf16": end,
    }
    if any(".experts." in name for name in shapes):
        # Each expert's tokens to a multiple of 32, with tokens of weight 0: the alltoall dispatcher does it, allgather cannot.
        settings |= {"moe_router_padding_for_quantization": True, "moe_token_dispatcher_type": "alltoall"}
    return settings


def count_layers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Layers of a model, by its checkpoint's names."""
    return 1 + max(int(match[1]) for name in shapes if (match := re.search(r"\.layers\.(\d+)\.", name)))


def _whole_layers(config: Mxfp8Config, layers: int) -> tuple[int, int]:
    extra = set(config.high_precision) - set(Mxfp8Config.model_fields["high_precision"].default)
    named = {index for index in range(layers) if f"*.layers.{index}.*" in extra}
    start = next(index for index in range(layers + 1) if index not in named)
    end = next(count for count in range(layers + 1) if layers - 1 - count not in named)
    if len(extra) != len(named) or (start + end != len(named) and start != layers):
        raise BadInput(
            "mxfp8.high_precision: on a GPU, besides routers, norms, embeddings and head, only whole layers at the start "
            f'and the end can stay in bf16 ("*.layers.0.*"); got {", ".join(sorted(extra))}'
        )
    return start, end


def emulate(model: PolicyModel, names: set[str]) -> list[RoundedWeight]:
    """Have the model's linear layers whose weights are made of `names` (checkpoint tensors) multiply in MXFP8.

    For Megatron's portable layers (a CPU), dense and of experts. The weights are to `forget` after every update.
    """
    quantised = {id(weight) for weight, hf_names in model.weight_sources() if set(hf_names) <= names}
    weights: list[RoundedWeight] = []
    for gpt in model.gpts:
        for module in gpt.modules():
            weight = getattr(module, "weight", None)
            if weight is not None and id(weight) in quantised and hasattr(module, "_forward_impl"):
                weights.append(RoundedWeight())
                module._forward_impl = partial(_linear, weights[-1])
    return weights


def _linear(
    weights: RoundedWeight, input: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: Any
) -> Tensor:
    """In the place of Megatron's linear_with_grad_accumulation_and_async_allreduce (and of its frozen form)."""
    if settings.get("sequence_parallel"):
        raise BadInput("mxfp8.emulation: not with update.parallel.sequence")
    group = settings.get("tp_group") if settings.get("allreduce_dgrad") else None
    y = Mxfp8Products.apply(input, weight, weights.of(weight), group)
    return y if bias is None else y + bias
