"""A policy version as a Hugging Face folder: its tensors, and the base model's configuration and tokenizer."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import BadInput
from infra.models.checkpoint import checkpoint_dtypes, checkpoint_tensors
from infra.numerics.mxfp8 import dequantize_tensors
from infra.policy import reader
from infra.policy.adapters import fuse_experts, fused_config, merged, write_folder
from infra.policy.version import PolicyVersion, describe, tensor_digest
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, open_artifact

if TYPE_CHECKING:
    from torch import Tensor

KIND = "model"
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py", ".md")
_OF_THE_BASE = ("config.json", "prepared.json", "*.index.json", "adapter_config.json")
"""What describes the base's weights, or others that lie beside them: an adapter's would have transformers look for that."""
_LICENSES = ("LICENSE", "NOTICE")


def write_model(stage: Stage, policy: ArtifactRef, base: str, facts: dict[str, str | int]) -> ArtifactRef:
    """Commit the folder's files. Holds one shard of the policy in memory at a time.

    An adapter is merged into the base model's weights; what MXFP8 holds becomes the numbers that it stands for.
    """
    what = describe(policy)
    dtypes: Counter[str] = Counter()
    size, digests = 0, {}

    def noted() -> "Iterator[tuple[str, Tensor]]":
        nonlocal size
        for name, tensor in numbers(policy, base):
            dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
            size += tensor.nbytes
            digests[name] = tensor_digest(tensor)
            yield name, tensor

    with stage.write(KIND, metadata={"policy_digest": what.policy_digest, "lineage": facts}) as writer:
        where = writer.tensors("model", noted())
        writer.json("config", model_config(Path(base), dtypes.most_common(1)[0][0]))
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        writer.json("model.safetensors.index", index)
        for path in sorted(Path(base).iterdir()):
            if (path.suffix in _COPIED or path.name in _LICENSES) and not _is_of_the_base(path.name):
                writer.bytes(path.name, path.read_bytes())
        writer.metadata["tensors"] = digests
    return writer.ref


def _is_of_the_base(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _OF_THE_BASE)


def is_plain(what: PolicyVersion) -> bool:
    """Whether the version's tensors are a checkpoint's as they are."""
    return what.adapter_config is None and all(info.dtype != "float8_e4m3fn" for info in what.tensors.values())


def numbers(policy: ArtifactRef, base: str) -> "Iterator[tuple[str, Tensor]]":
    """A version as a checkpoint's tensors, those that it changes in the base model's dtypes."""
    what = describe(policy)
    if is_plain(what):
        yield from reader.read(policy)
    elif what.adapter_config is not None:
        scale = what.adapter_config["lora_alpha"] / what.adapter_config["r"]
        yield from merged(checkpoint_tensors(base), dict(reader.read(policy)), scale)
    else:
        dtypes = checkpoint_dtypes(base)
        for name, tensor in dequantize_tensors(reader.read(policy)):
            yield name, tensor.to(dtypes[name])


def write_adapter(policy: ArtifactRef, folder: Path, fused_experts: bool) -> None:
    """A new folder with a version's adapter as PEFT, transformers and vLLM load it. BadInput when it is no adapter.

    fused_experts: in PEFT's layout for models that keep all experts of a layer in one parameter.
    """
    what = describe(policy)
    if what.adapter_config is None:
        raise BadInput(f"adapter_folder: version {what.version} is a whole policy; leave it out")
    tensors, config = dict(reader.read(policy)), what.adapter_config
    if fused_experts:
        tensors = fuse_experts(tensors)
        config = fused_config(config, tensors)
    write_folder(folder, tensors, config)


def model_config(base: Path, dtype: str) -> dict[str, Any]:
    """The base's config.json, with the dtype that most of the policy's tensors have."""
    config = json.loads((base / "config.json").read_text())
    config.pop("torch_dtype", None)  # the name of `dtype` before transformers 5
    return config | {"dtype": dtype}


def model_folder(model: ArtifactRef) -> str:
    """Address of the folder itself, below the artifact's; its `local_path` (infra/storage/urls.py) is what from_pretrained loads."""
    return f"{model.uri}/{open_artifact(model).manifest.folder}"


def fetch_model(model: ArtifactRef, folder: str | Path) -> Path:
    """Write the checked files into a new folder of this machine. Raises BadInput when it exists."""
    folder, artifact = Path(folder), open_artifact(model)
    if folder.exists():
        raise BadInput(f"folder {folder} exists; name a new one")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in artifact.names:
        (partial / name).write_bytes(artifact.buffer(name))
    partial.rename(folder)
    return folder
