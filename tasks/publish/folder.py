"""A policy version as a Hugging Face folder: its tensors, and the base model's configuration and tokenizer."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from infra import policy as policies
from infra.artifacts import ArtifactRef, open_artifact
from infra.errors import BadInput
from infra.run import Stage

KIND = "model"
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py", ".md")
_OF_THE_BASE = {"model.safetensors.index.json", "prepared.json", "config.json"}
_LICENSES = ("LICENSE", "NOTICE")


def write_model(stage: Stage, policy: ArtifactRef, base: str, facts: dict[str, str | int]) -> ArtifactRef:
    """Commit the folder's files. Holds one shard of the policy in memory at a time."""
    import torch

    what = policies.describe(policy)
    with stage.write(KIND, metadata={"policy_digest": what.policy_digest, "lineage": facts}) as writer:
        where = writer.tensors("model", policies.read(policy))
        dtypes = Counter(info.dtype for info in what.tensors.values())
        writer.json("config", model_config(Path(base), dtypes.most_common(1)[0][0]))
        size = sum(math.prod(info.shape) * getattr(torch, info.dtype).itemsize for info in what.tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        writer.json("model.safetensors.index", index)
        for path in sorted(Path(base).iterdir()):
            if (path.suffix in _COPIED or path.name in _LICENSES) and path.name not in _OF_THE_BASE:
                writer.bytes(path.name, path.read_bytes())
    return writer.ref


def model_config(base: Path, dtype: str) -> dict[str, Any]:
    """The base's config.json, with the dtype that most of the policy's tensors have."""
    config = json.loads((base / "config.json").read_text())
    config.pop("torch_dtype", None)  # the name of `dtype` before transformers 5
    return config | {"dtype": dtype}


def model_folder(model: ArtifactRef) -> str:
    """URL of the folder itself, below the artifact's: for file:// what from_pretrained loads."""
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
