"""The tensors of a Beam checkpoint: their names, shapes and dtypes, and the check that a folder holds exactly those."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from infra.errors import BadInput
from infra.models.beam.config import BeamConfig

ROUTER_TENSORS = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
"""Endings of the names that are fp32 whatever the model's dtype: a router cast to bf16 chooses other experts."""


LORA_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_gate": ("gate_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's names of what LoRA can adapt, and the projections that each is in a checkpoint (and in vLLM).
linear_qkv, linear_gate and linear_proj are in self_attn; linear_fc1 and linear_fc2 in mlp and mlp.experts.E."""


def is_router(name: str) -> bool:
    """Whether the tensor called `name` belongs to a router and is therefore fp32 everywhere."""
    return name.endswith(ROUTER_TENSORS)


def dtype_of(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tensor `name` in a checkpoint, an artifact or on the wire, for a model of `model_dtype`."""
    return torch.float32 if is_router(name) else model_dtype


def shapes(config: BeamConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape by its checkpoint name; weights are [out, in]."""
    vocab, hidden = config.vocab_size, config.hidden_size
    table = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer, kind in enumerate(config.mlp_layer_types):
        prefix = f"model.layers.{layer}."
        table |= {prefix + name: shape for name, shape in _attention_and_norms(config)}
        if kind == "dense":
            table |= dict(_mlp(prefix + "mlp.", hidden, config.intermediate_size))
            continue
        table[prefix + "mlp.gate.weight"] = (config.num_experts, hidden)
        table[prefix + "mlp.gate.e_score_correction_bias"] = (config.num_experts,)
        for expert in range(config.num_experts):
            table |= dict(_mlp(f"{prefix}mlp.experts.{expert}.", hidden, config.moe_intermediate_size))
    return table


def _attention_and_norms(config: BeamConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield f"{norm}_layernorm.weight", (hidden,)
    for name, rows in (("q", queries), ("k", keys), ("v", keys), ("gate", queries)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "self_attn.q_norm.weight", (head,)
    yield "self_attn.k_norm.weight", (head,)
    yield "self_attn.gate_bias", (config.num_attention_heads,)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)


def check(config: BeamConfig, found: Mapping[str, Sequence[int]]) -> None:
    """Refuse a set of tensors (name -> shape) that is not exactly the one `config` describes.

    Raises BadInput with every kind of difference: names that are missing, names that are too many, wrong shapes.
    """
    expected = shapes(config)
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    misshapen = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    faults = [("missing", missing), ("not part of a Beam", extra), ("of the wrong shape", misshapen)]
    said = [f"{len(names)} {fault}: {_some(names)}" for fault, names in faults if names]
    if said:
        raise BadInput("the checkpoint's tensors do not fit its config.json. " + "; ".join(said))


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
