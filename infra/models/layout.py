"""Whether a model can be split as the settings say: read off its config.json, before anything starts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import BadInput

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class Sizes:
    """What a parallel size must divide; 0: config.json does not say, and nothing is asked of it."""

    heads: int = 0
    kv_heads: int = 0
    layers: int = 0
    experts: int = 0
    """Routed experts of a layer."""
    widths: tuple[tuple[str, int], ...] = ()
    """Of the MLPs: (the key in config.json, rows of the up projection). An expert's is moe_intermediate_size."""

    @classmethod
    def of(cls, folder: Path) -> "Sizes":
        """Of a Hugging Face folder."""
        config = json.loads((Path(folder) / "config.json").read_text())
        config = config.get("text_config") or config
        experts = max((_count(config, key) for key in _EXPERT_COUNTS), default=0)
        heads = _count(config, "num_attention_heads")
        return cls(
            heads=heads,
            kv_heads=_count(config, "num_key_value_heads") or heads,
            layers=_count(config, "num_hidden_layers"),
            experts=experts if experts > 1 else 0,
            widths=tuple((key, _count(config, key)) for key in _MLP_WIDTHS if _count(config, key)),
        )


def check_engine(sizes: Sizes, tensor: int, pipeline: int, expert_parallel: bool) -> None:
    """BadInput where vLLM cannot split the model into tensor x pipeline workers, experts whole with `expert_parallel`."""
    _divides("rollout.tensor_parallel_size", tensor, "num_attention_heads", sizes.heads)
    _divides_or_is_divided("rollout.tensor_parallel_size", tensor, sizes.kv_heads)
    for key, width in sizes.widths:
        if not (expert_parallel and key == "moe_intermediate_size"):
            _divides("rollout.tensor_parallel_size", tensor, key, width)
    _has_layers("rollout.pipeline_parallel_size", pipeline, sizes.layers)
    if expert_parallel and not sizes.experts:
        raise BadInput(
            "rollout.engine: enable_expert_parallel spreads a layer's experts, and the model has none: leave it out"
        )


def check_trainer(sizes: Sizes, tensor: int, pipeline: int, virtual: int | None, expert: int) -> None:
    """BadInput where Megatron cannot split the model: its sizes are those of update.parallel."""
    _divides("update.parallel.tensor", tensor, "num_attention_heads", sizes.heads)
    _divides_or_is_divided("update.parallel.tensor", tensor, sizes.kv_heads)
    for key, width in sizes.widths:
        if not (expert > 1 and key == "moe_intermediate_size"):
            _divides("update.parallel.tensor", tensor, key, width)
    _divides("update.parallel.pipeline", pipeline, "num_hidden_layers", sizes.layers)
    if virtual is not None and sizes.layers % (pipeline * virtual):
        raise BadInput(
            f"update.parallel.virtual {virtual}: with update.parallel.pipeline {pipeline} it must divide num_hidden_layers "
            f"({sizes.layers})"
        )
    if expert > 1:
        if not sizes.experts:
            raise BadInput(f"update.parallel.expert {expert} spreads a layer's experts, and the model has none: use 1")
        _divides("update.parallel.expert", expert, "num_experts", sizes.experts)


def _count(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def _divides(setting: str, size: int, key: str, number: int) -> None:
    if number % size:
        raise BadInput(f"{setting} {size}: it must divide the model's {key} ({number}); {_fitting(number, size)} does")


def _divides_or_is_divided(setting: str, size: int, kv_heads: int) -> None:
    if kv_heads and kv_heads % size and size % kv_heads:
        raise BadInput(
            f"{setting} {size}: it must divide the model's num_key_value_heads ({kv_heads}) or be a multiple of it; "
            f"{_fitting(kv_heads, size)} does"
        )


def _has_layers(setting: str, stages: int, layers: int) -> None:
    if layers and stages > layers:
        raise BadInput(f"{setting} {stages}: the model has {layers} layers, and each stage needs one")


def _fitting(number: int, size: int) -> int:
    """The largest divisor of the number that is below the size."""
    return next(divisor for divisor in range(min(size, number), 0, -1) if number % divisor == 0)
