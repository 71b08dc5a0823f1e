"""The weights of a Hugging Face folder: which files hold them, and what these say of their tensors. Needs no torch.

Whoever reads a folder's weights asks here, so that trainer, engines, fingerprint and publication read the same files.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import BadInput

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "backbone.embeddings.weight", "wte.weight")


@dataclass(frozen=True)
class Weight:
    """One tensor in its file."""

    file: Path
    dtype: str
    """As safetensors names it: BF16, F32, ..."""
    shape: tuple[int, ...]
    begin: int
    end: int
    """Its bytes are file[begin:end]."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model's weights, by name: those of the index, or model.safetensors alone.

    What else lies beside an index (an old shard, consolidated.safetensors, an adapter) is none of the model's. BadInput for
    files that are missing, and where libraries would not read the same ones.
    """
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise BadInput(
                f"model {folder}: {len(missing)} of {len(names)} weight files are missing, e.g. {missing[0]}"
            )
        if SINGLE not in names and (folder / SINGLE).is_file():
            raise BadInput(
                f"model {folder}: {SINGLE} lies beside {INDEX}, which does not name it: transformers would load the one, "
                "vLLM and Megatron-Bridge what the other names. Move away what is not the model's"
            )
        return [folder / name for name in names]
    names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not names:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = "pickled weights are not loaded: convert them" if pickled else f"expected {SINGLE}"
        raise BadInput(f"model {folder}: no *.safetensors; {hint}")
    if SINGLE not in names:
        raise BadInput(
            f"model {folder}: there is {names[0]}, but neither {INDEX}, which names the weight files, nor {SINGLE}"
        )
    if others := [name for name in names if name != SINGLE]:
        raise BadInput(
            f"model {folder}: {others[0]} lies beside {SINGLE}, and no {INDEX} says which are the model's weights; "
            "move away what is not"
        )
    return [folder / SINGLE]


def weights(folder: Path) -> dict[str, Weight]:
    """The model's tensors by name, each once: where config.json ties the output layer to the embedding, the files' copy of
    the embedding (`tied_copy`) is left out. BadInput for files that are cut off, and for an index that is not theirs."""
    found = _in_files(folder)
    copy = _copy(folder, found)
    return {name: weight for name, weight in found.items() if name != copy}


def tied_copy(folder: Path) -> str | None:
    """The name under which the files hold a tied embedding once more; None: they do not. BadInput when it is another
    tensor: transformers and vLLM would then use both, Megatron trains one."""
    return _copy(folder, _in_files(folder))


def json_object(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object in a file of the folder, else BadInput."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"model {folder}: {name} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadInput(f"model {folder}: {name} is no JSON object")
    return value


def _weight_map(folder: Path) -> dict[str, str]:
    files = json_object(folder, INDEX).get("weight_map")
    # A weight file is one of this folder's: a path could lead anywhere.
    if not files or not isinstance(files, dict) or not all(_is_weight_file(name) for name in files.values()):
        raise BadInput(f"model {folder}: {INDEX} has no weight_map of tensors to files of the folder (*.safetensors)")
    return files


def _is_weight_file(name: Any) -> bool:
    return isinstance(name, str) and name == Path(name).name and name.endswith(".safetensors")


def _in_files(folder: Path) -> dict[str, Weight]:
    files = weight_files(folder)
    placed = _weight_map(folder) if (folder / INDEX).is_file() else None
    found: dict[str, Weight] = {}
    for file in files:
        for name, weight in _read_header(file).items():
            place = file.name if placed is None else placed.get(name)
            if place != file.name:
                said = f"places in {place}" if place else "does not name"
                raise BadInput(f"model {folder}: {file.name} has the tensor {name}, which {INDEX} {said}")
            found[name] = weight
    if missing := sorted((placed or {}).keys() - found.keys()):
        raise BadInput(f"model {folder}: {INDEX} places {missing[0]} in {(placed or {})[missing[0]]}, which has none")
    return found


def _read_header(path: Path) -> dict[str, Weight]:
    """The offsets must end where the file ends: a download that broke off is told here, not minutes later."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        start = 8 + length
        found = {name: _weight(path, start, entry) for name, entry in header.items() if name != "__metadata__"}
        expected = max(weight.end for weight in found.values())
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInput(f"model {path.parent}: {path.name} is no safetensors file, or only its beginning") from None
    if size != expected:
        raise BadInput(
            f"model {path.parent}: {path.name} has {size:,} bytes, its header says {expected:,}; copy it again"
        )
    return found


def _weight(file: Path, start: int, entry: dict[str, Any]) -> Weight:
    """Raises ValueError, KeyError or TypeError for an entry that describes no tensor."""
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if any(type(number) is not int or number < 0 for number in numbers) or not isinstance(entry["dtype"], str):
        raise ValueError("no dtype, shape and offsets")
    if begin > end or (begin == end) != (0 in entry["shape"]):
        raise ValueError("as many bytes as the shape has elements")
    return Weight(file, entry["dtype"], tuple(entry["shape"]), start + begin, start + end)


def _copy(folder: Path, found: dict[str, Weight]) -> str | None:
    heads = [name for name in found if name == _HEAD or name.endswith(f".{_HEAD}")]
    embeddings = [name for name in found if name.endswith(_EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1 or not ties_embeddings(folder):
        return None
    head, embedding = found[heads[0]], found[embeddings[0]]
    kinds = [f"{weight.dtype} {list(weight.shape)}" for weight in (head, embedding)]
    if kinds[0] != kinds[1] or not _same_bytes(head, embedding):
        how = f"{kinds[0]} instead of {kinds[1]}" if kinds[0] != kinds[1] else "other values"
        raise BadInput(
            f"model {folder}: config.json ties the word embeddings, but {heads[0]} is not {embeddings[0]} ({how}): set "
            f"tie_word_embeddings to false to train both, or leave {heads[0]} out of the files"
        )
    return heads[0]


def ties_embeddings(folder: Path) -> bool:
    """Whether the output layer is the embedding: as config.json says or, where it is silent, by its class's default."""
    if not (folder / "config.json").is_file():
        return False
    config = json_object(folder, "config.json")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("tie_word_embeddings"), bool):
            return part["tie_word_embeddings"]
    from transformers import AutoConfig

    try:
        return bool(getattr(AutoConfig.from_pretrained(folder), "tie_word_embeddings", False))
    except ValueError:  # a family that is not transformers' own
        return False


def _same_bytes(one: Weight, other: Weight, block: int = 1 << 24) -> bool:
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.begin)
        right.seek(other.begin)
        rest = one.end - one.begin
        while rest:
            size = min(rest, block)
            if left.read(size) != right.read(size):
                return False
            rest -= size
    return True


def checkpoint_shapes(model_dir: str) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the tensors of a model folder, each once: what a full policy of this model consists of."""
    return {name: weight.shape for name, weight in weights(Path(model_dir)).items()}


def checkpoint_dtypes(model_dir: str) -> "dict[str, torch.dtype]":
    """{name: dtype} of the same."""
    from infra.numerics.tensors import DTYPES

    held = weights(Path(model_dir))
    unknown = sorted({weight.dtype for weight in held.values()} - DTYPES.keys())
    if unknown:
        raise BadInput(f"model folder {model_dir}: tensors of dtype {unknown[0]}; known are {', '.join(DTYPES)}")
    return {name: DTYPES[weight.dtype] for name, weight in held.items()}


def checkpoint_tensors(model_dir: str) -> "Iterator[tuple[str, torch.Tensor]]":
    """(name, tensor) of the same, one in memory at a time."""
    from safetensors import safe_open

    held = weights(Path(model_dir))
    for path in dict.fromkeys(weight.file for weight in held.values()):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name in held:
                    yield name, file.get_tensor(name)
