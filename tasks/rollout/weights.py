"""A policy's tensors, by their checkpoint names, into and out of a vLLM model in place.

`load` and `export` run inside each vLLM worker (`LLM.collective_rpc`).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from infra.errors import BadInput


def collect(
    tensors: Iterable[tuple[str, torch.Tensor]], expected: dict[str, tuple[int, ...]]
) -> list[tuple[str, torch.Tensor]]:
    """Every expected tensor once, before any is loaded: an iterator that fails half-way leaves the engine as it was.

    Holds references, no copies. Raises BadInput that names an unknown, repeated, misshapen, non-float or missing tensor.
    """
    collected: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name not in expected:
            raise BadInput(f"policy tensor {name!r}: the model has none of that name")
        if name in collected:
            raise BadInput(f"policy tensor {name!r}: given twice")
        if tuple(tensor.shape) != expected[name]:
            raise BadInput(f"policy tensor {name!r}: shape {list(tensor.shape)}, the model's is {list(expected[name])}")
        if not tensor.is_floating_point():
            raise BadInput(f"policy tensor {name!r}: {tensor.dtype}, a floating point tensor is expected")
        collected[name] = tensor
    if missing := sorted(expected.keys() - collected.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadInput(f"policy tensor {missing[0]!r}{more}: missing")
    return list(collected.items())


def keep_explicit_lm_head() -> None:
    """Two matrices that are equal at load need not stay so: vLLM would share their memory and lose one of them."""
    import vllm.model_executor.model_loader.utils as loader

    loader.maybe_retie_word_embeddings = lambda *arguments: None


@torch.no_grad()
def load(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load a full policy over the worker's model. Each parameter keeps its memory and its dtype.

    Linear layers and embeddings are copied into. Layers whose kernels hold another layout than the checkpoint (experts;
    everything when the model is quantized or uses latent attention) go through vLLM's reload, which lays them out anew.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, config = worker.model_runner.model, worker.model_runner.model_config
    roots = [model] if config.quantization or config.use_mla else [module for _, module in experts(model)]
    with torch.device(worker.device):
        for root in roots:
            initialize_layerwise_reload(root)
        try:
            model.load_weights(iter(tensors))
        finally:
            for root in roots:
                finalize_layerwise_reload(root, config)


def experts(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """(name, module) of the modules that hold stacked experts: w13_weight [E, 2I, H] and w2_weight [E, H, I]."""
    return [(name, module) for name, module in model.named_modules() if "w13_weight" in module._parameters]


def export(worker: Any, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's parameters under the checkpoint's names and shapes, in the engine's dtype; views where possible.

    Undoes vLLM's stacking (qkv, gate and up, experts) and packing. For one worker that holds the whole model (no tensor
    or pipeline parallelism). Raises BadInput that names a tensor whose place in the model it does not know.
    """
    model = worker.model_runner.model
    parts = _parts(model)
    for name in names:
        if name not in parts:
            raise BadInput(f"tensor {name!r}: not found in the engine's model")
        yield name, parts[name]


def _parts(model: Any) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor] = {}
    stacked = getattr(model, "packed_modules_mapping", {}) | {"gate_up_proj": ["gate_proj", "up_proj"]}
    held = {name for name, _ in experts(model)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, kind = name.rpartition(".")
        if path in held:
            continue
        parent, _, leaf = path.rpartition(".")
        module = model.get_submodule(path)
        if leaf in stacked and hasattr(module, "output_sizes"):
            pieces = parameter.data.split(list(module.output_sizes))
            parts |= {f"{parent}.{piece}.{kind}": data for piece, data in zip(stacked[leaf], pieces, strict=True)}
        else:
            parts[name] = parameter.data[: getattr(module, "org_vocab_size", None)]
    for name, module in experts(model):
        parts |= _expert_parts(name.removesuffix(".routed_experts"), module)
    return parts


def _expert_parts(path: str, module: Any) -> dict[str, torch.Tensor]:
    config = module.moe_config
    size = config.intermediate_size_per_partition
    w13, w2 = _unpacked(module, "w13_weight"), _unpacked(module, "w2_weight")
    padded = w13.shape[1] // 2
    parts: dict[str, torch.Tensor] = {}
    for expert in range(w13.shape[0]):
        parts[f"{path}.{expert}.gate_proj.weight"] = w13[expert, :size]
        parts[f"{path}.{expert}.up_proj.weight"] = w13[expert, padded : padded + size]
        parts[f"{path}.{expert}.down_proj.weight"] = w2[expert, :, :size]
    return parts


def _unpacked(module: Any, name: str) -> torch.Tensor:
    """An expert parameter [E, rows, columns] in plain order. On the CPU vLLM keeps it permuted for its kernel."""
    weight = getattr(module, name).data
    kernel = module.quant_method.moe_kernel.fused_experts
    if not hasattr(kernel, "isa"):
        return weight
    order = _packing_order(weight[:1], kernel.isa)
    plain = torch.empty_like(weight).flatten(1)
    plain[:, order] = weight.flatten(1)
    return plain.view_as(weight)


def _packing_order(like: torch.Tensor, isa: str) -> torch.Tensor:
    """int64 [n]: entry j of a packed expert is entry order[j] of the plain one. Found by packing the indices' digits, each
    small enough to be exact in bfloat16."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    index = torch.arange(like.numel())
    order = torch.zeros_like(index)
    for shift in range(0, 32, 8):
        digits = ((index >> shift) & 255).to(like.dtype).view(like.shape)
        order += cpu_prepack_moe_weight(digits, isa).flatten().long() << shift
    return order
