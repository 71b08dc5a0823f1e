"""LoRA adapters: their settings, PEFT's names and layouts, and what an adapter is when it is merged.

A tensor is named `base_model.model.<module>.lora_A.weight` [rank, in] or `.lora_B.weight` [out, rank], <module> as in the
base model's checkpoint; the adapted weight is W + alpha / rank * B @ A. Experts come in two layouts: 2-D, a pair for each
expert's projection (`...mlp.experts.3.up_proj`), and 3-D, PEFT's layout for models that keep all experts in one
parameter (`gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]; see `fuse_experts`).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from infra.config import Config
from infra.errors import BadInput
from infra.numerics.mxfp8 import Mxfp8Config

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can be started for; an adapter of another rank is served by the next one."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.lora_([AB])\.weight")


class LoraConfig(Config):
    """LoRA: what is trained and served in place of the whole policy when `policy` is "lora"."""

    rank: int = Field(32, ge=1, le=ENGINE_RANKS[-1])
    """Rank of each adapted matrix."""
    alpha: float = Field(64, gt=0)
    """The adapter's product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    """Modules that get an adapter, by Megatron's names: linear_qkv (q, k and v, with one A), linear_proj (the attention's
    output), linear_gate (Beam's attention gate), linear_fc1 (gate and up, with one A) and linear_fc2 (down), of dense layers
    and of every expert. Patterns name modules of some layers or kinds only: "*.layers.1.mlp.*.linear_fc1"."""
    experts: Literal["each", "shared_outer"] = "each"
    """Of experts: each has its own A and B; or shared_outer: the A of gate and up, and the B of down, are one for all
    experts of a layer, which saves most of the adapter's memory (needs Megatron's grouped experts: a GPU)."""

    tuned_configs: str | None = None
    """Folder of tile sizes (JSON) for vLLM's LoRA and expert kernels, tuned for this GPU, hidden size and rank with vLLM's
    benchmarks/kernels; null: vLLM's own choice. GPU only. What no kernel reads is told in the engine's log."""

    @field_validator("targets")
    @classmethod
    def _some(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if not targets:
            raise ValueError("name at least one module, e.g. linear_qkv")
        return targets

    @property
    def engine_rank(self) -> int:
        """The smallest rank that an engine can be started for and that serves this adapter."""
        return next(rank for rank in ENGINE_RANKS if rank >= self.rank)


MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_gate": ("gate_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's modules and the checkpoint's projections in them; linear_gate is an attention's."""


def megatron_names(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Megatron's names of the modules that may have an adapter, of a checkpoint's tensors; grouped and single experts."""
    kinds = {"self_attn": ("linear_qkv", "linear_gate", "linear_proj"), "mlp": ("linear_fc1", "linear_fc2")}
    names: set[str] = set()
    for name in shapes:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(self_attn|mlp)\.(?:(experts)\.(\d+)\.)?(\w+_proj)\.weight", name)
        if match is None:
            continue
        layer, kind, is_expert, expert, projection = match.groups()
        for module in kinds[kind]:
            if projection not in MODULES[module]:
                continue
            path = f"decoder.layers.{layer}." + {"self_attn": "self_attention", "mlp": "mlp"}[kind]
            names.add(f"{path}.experts.local_experts.{expert}.{module}" if is_expert else f"{path}.{module}")
            if is_expert:
                names.add(f"{path}.experts.{module}")
    return names


def check_targets(config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """BadInput that names a target which matches nothing in the model of this checkpoint, or more than what can have an
    adapter (norms, whole layers), and what it has."""
    names = megatron_names(shapes)
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
    for target in config.targets:
        if not any(matches(target, name) for name in names):
            raise BadInput(f"lora.targets: {target!r} matches no module of the model; it has {kinds}")
        last = target.rpartition(".")[2]
        if not (last.startswith("linear_") or last.endswith(tuple(MODULES))):
            raise BadInput(
                f"lora.targets: {target!r} matches modules that cannot have an adapter, too; end it in one of {kinds}"
            )


def check_rank(config: LoraConfig, mxfp8: Mxfp8Config | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """BadInput for a rank that experts' adapters cannot have in MXFP8 on GPUs."""
    native = mxfp8 is not None and mxfp8.train and not mxfp8.emulation
    if native and config.rank % 32 == 16 and any(".experts." in name for name in shapes):
        raise BadInput(
            f"lora.rank {config.rank}: in MXFP8 on GPUs Megatron-Bridge multiplies experts' adapters of ranks divisible by 16 "
            "in MXFP8 too, which needs a multiple of 32; take one, or a rank such as 8"
        )


def check_tuned_configs(config: LoraConfig) -> None:
    """BadInput unless `tuned_configs` is a folder of JSON files."""
    if config.tuned_configs is None:
        return
    folder = Path(config.tuned_configs)
    if not folder.is_dir():
        raise BadInput(f"lora.tuned_configs: {folder} is no folder of this machine")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise BadInput(
            f"lora.tuned_configs: {folder} has no .json file; vLLM's benchmarks/kernels/benchmark_moe.py and "
            "benchmark_lora.py are what to tune with"
        )
    for file in files:
        try:
            tuned = json.loads(file.read_text())
        except ValueError:
            tuned = None
        if not isinstance(tuned, dict):
            raise BadInput(f"lora.tuned_configs: {file} is no JSON object of tile sizes")


def matches(target: str, name: str) -> bool:
    """Whether a target names the module: by its last part, or as a pattern in which * stands for anything."""
    pattern = ".*".join(re.escape(part) for part in target.split("*"))
    return name.rpartition(".")[2] == target or re.fullmatch(pattern, name) is not None


def peft_config(config: LoraConfig, names: Iterable[str], base: str = "") -> dict[str, Any]:
    """adapter_config.json for tensors of these names (2-D layout), as PEFT, transformers and vLLM read it."""
    modules = sorted({module_of(name).rpartition(".")[2] for name in names})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def base_name(model: str) -> str:
    """What adapter_config.json calls the base model: as the settings do, or, where that is a place on this machine, its
    folder. Equal runs on two machines then commit equal versions."""
    path = Path(model)
    return path.name if path.is_absolute() or model.startswith("~") else model


def module_of(name: str) -> str:
    """The base model's module that a tensor of an adapter belongs to. BadInput for any other name."""
    match = re.fullmatch(rf"(?:{re.escape(PREFIX)})?(.+)\.lora_[AB]\.weight", name)
    if match is None:
        raise BadInput(f"adapter tensor {name!r}: expected {PREFIX}<module>.lora_A.weight or .lora_B.weight")
    return match[1]


def pairs(tensors: Mapping[str, "Tensor"]) -> dict[str, tuple["Tensor", "Tensor"]]:
    """{module: (A, B)}. BadInput when one of a pair is missing or their ranks differ."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(module_of(name), {})[name.rsplit(".", 2)[1]] = tensor
    for module, pair in found.items():
        if len(pair) != 2 or pair["lora_A"].shape[0] != pair["lora_B"].shape[1]:
            shapes = {side: list(tensor.shape) for side, tensor in sorted(pair.items())}
            raise BadInput(f"adapter of {module}: expected lora_A [rank, in] and lora_B [out, rank], got {shapes}")
    return {module: (pair["lora_A"], pair["lora_B"]) for module, pair in found.items()}


def check_fits(tensors: Mapping[str, "Tensor"], shapes: Mapping[str, tuple[int, ...]], engine_rank: int) -> None:
    """BadInput when the adapter is not of the model whose checkpoint has `shapes`, or its rank is above the engine's."""
    for module, (a, b) in pairs(tensors).items():
        expected = shapes.get(f"{module}.weight")
        if expected is None:
            raise BadInput(f"adapter of {module}: the model has no such module")
        if (b.shape[0], a.shape[1]) != tuple(expected):
            raise BadInput(
                f"adapter of {module}: it is for a weight {[b.shape[0], a.shape[1]]}, the model's is {list(expected)}"
            )
        if a.shape[0] > engine_rank:
            raise BadInput(
                f"adapter of {module}: rank {a.shape[0]}, but the engine was started for rank {engine_rank}; "
                f"raise lora.rank (engines are started for one of {', '.join(map(str, ENGINE_RANKS))})"
            )


def merged(
    base: Iterable[tuple[str, "Tensor"]], tensors: Mapping[str, "Tensor"], scale: float
) -> Iterator[tuple[str, "Tensor"]]:
    """The base model's tensors with the adapter (2-D layout) merged in: W + scale * B @ A in fp32, rounded once.

    BadInput when the adapter has a module that the base lacks.
    """
    adapters = pairs(tensors)
    for name, tensor in base:
        pair = adapters.pop(name.removesuffix(".weight"), None)
        if pair is None:
            yield name, tensor
        else:
            a, b = (side.float() for side in pair)
            yield name, (tensor.float() + scale * (b @ a)).to(tensor.dtype)
    if adapters:
        raise BadInput(f"adapter of {min(adapters)}: the model has no such module")


def fuse_experts(tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """2-D expert tensors as PEFT's for one parameter of all experts; other tensors as they are.

    With E experts of rank r: lora_A [r * E, in], expert by expert; lora_B [out, r * E], the expert's index fastest. The
    inner wrapper (`experts.base_layer`) is gate_up_proj's, the outer (`experts`) down_proj's. Gate and up that have one A
    keep the rank; else their B is block-diagonal and the rank doubles.
    """
    import torch

    fused: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[str, str], dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            fused[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault((match[3], match[4]), {})[int(match[2])] = tensor
    for path, sides in experts.items():
        stacked = {side: torch.stack([by_expert[e] for e in sorted(by_expert)]) for side, by_expert in sides.items()}
        if ("gate_proj", "A") in stacked:
            a_gate, a_up = stacked["gate_proj", "A"], stacked["up_proj", "A"]
            b_gate, b_up = stacked["gate_proj", "B"], stacked["up_proj", "B"]
            if torch.equal(a_gate, a_up):
                a, b = a_gate, torch.cat([b_gate, b_up], dim=1)
            else:
                a = torch.cat([a_gate, a_up], dim=1)
                b = torch.stack([torch.block_diag(*pair) for pair in zip(b_gate, b_up, strict=True)])
            fused |= _as_parameter(f"{path}.base_layer", a, b)
        if ("down_proj", "A") in stacked:
            fused |= _as_parameter(path, stacked["down_proj", "A"], stacked["down_proj", "B"])
    return fused


def _as_parameter(path: str, a_ErI: "Tensor", b_EOr: "Tensor") -> dict[str, "Tensor"]:
    return {
        f"{path}.lora_A.weight": a_ErI.flatten(0, 1),
        f"{path}.lora_B.weight": b_EOr.permute(1, 2, 0).flatten(1).contiguous(),
    }


def fused_config(config: dict[str, Any], tensors: Mapping[str, "Tensor"]) -> dict[str, Any]:
    """adapter_config.json of what `fuse_experts` gave for an adapter with `config`."""
    inner = [name for name in tensors if name.endswith(".experts.base_layer.lora_A.weight")]
    outer = [name for name in tensors if name.endswith(".experts.lora_A.weight")]
    parameters = [f"{PREFIX_EXPERTS}gate_up_proj"] * bool(inner) + [f"{PREFIX_EXPERTS}down_proj"] * bool(outer)
    dense = {module_of(name).rpartition(".")[2] for name in tensors if ".experts." not in name}
    result = config | {"target_modules": sorted(dense), "target_parameters": parameters}
    if inner:
        name = inner[0]
        experts = tensors[outer[0]].shape[0] // config["r"] if outer else None
        rank = tensors[name].shape[0] // experts if experts else config["r"]
        if rank != config["r"]:  # gate and up with an A each: alpha / rank must stay what it was
            result["rank_pattern"] = {f"{PREFIX_EXPERTS}gate_up_proj": rank}
            result["alpha_pattern"] = {f"{PREFIX_EXPERTS}gate_up_proj": config["lora_alpha"] * rank / config["r"]}
    return result


PREFIX_EXPERTS = "mlp.experts."


def write_folder(folder: Path, tensors: Mapping[str, "Tensor"], config: dict[str, Any]) -> None:
    """A folder that PEFT, transformers and vLLM load: adapter_config.json and adapter_model.safetensors."""
    from infra.storage.safetensors import write_safetensors

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    with (folder / "adapter_model.safetensors").open("wb") as file:
        write_safetensors(dict(tensors), file.write)
