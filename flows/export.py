"""Export: the last policy of a run as a folder that transformers, vLLM and PEFT load."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flows.config import TrainConfig
from flows.session import home
from infra import policy
from infra.adapters import fuse_experts, fused_config, merged, write_folder
from infra.errors import BadInput
from infra.models.catalog import prepare_model
from infra.run import Run
from infra.store import Store

if TYPE_CHECKING:
    from torch import Tensor


def export(config: TrainConfig, to: Path | None, merge: bool = False, fused: bool = False) -> Path:
    """Write the last committed policy of `config.run` into the folder `to`, which must not exist; returns it.

    An adapter becomes a PEFT folder, with `fused` in PEFT's layout for models that keep all experts in one parameter;
    with `merge`, and for whole policies, it is a model folder with the base model's config and tokenizer. What MXFP8
    holds is written as the numbers that it stands for, in the base model's dtypes.
    """
    if not config.run or to is None:
        raise BadInput("export: name the run (run=NAME) and the folder (--to FOLDER)")
    if to.exists():
        raise BadInput(f"export: {to} exists; name a new folder")
    head = Run(store=Store.at(config.store).url, name=config.run).head()
    if head is None:
        raise BadInput(f"run: {config.run!r} has no committed policy in {config.store}; train it first")
    what = policy.describe(head.policy)
    if merge and what.adapter_config is None:
        raise BadInput(f"export: run {config.run!r} has trained the whole policy; leave --merged away")
    if what.adapter_config is None or merge:
        _write_model(to, prepare_model(config.model, home() / "models"), head.policy, what)
        return to
    tensors, settings = dict(policy.read(head.policy)), what.adapter_config
    if fused:
        tensors = fuse_experts(tensors)
        settings = fused_config(settings, tensors)
    write_folder(to, tensors, settings)
    return to


def _write_model(to: Path, base: Path, ref: policy.ArtifactRef, what: policy.PolicyVersion) -> None:
    from infra.mxfp8 import dequantize_tensors
    from infra.tensors import write_safetensors

    own = dict(_tensors_of(base))
    if what.adapter_config is not None:
        scale = what.adapter_config["lora_alpha"] / what.adapter_config["r"]
        whole = dict(merged(own.items(), dict(policy.read(ref)), scale))
    else:
        whole = {name: tensor.to(own[name].dtype) for name, tensor in dequantize_tensors(policy.read(ref))}
    shutil.copytree(
        base, to, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "prepared.json")
    )
    with (to / "model.safetensors").open("wb") as file:
        write_safetensors(whole, file.write)


def _tensors_of(folder: Path) -> "Iterator[tuple[str, Tensor]]":
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
