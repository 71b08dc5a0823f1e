"""Which files are a model's weights, and which tensors are its own: the same for every reader, or refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from infra.errors import BadInput
from infra.models.catalog import fingerprint
from infra.models.checkpoint import (
    INDEX,
    SINGLE,
    checkpoint_dtypes,
    checkpoint_shapes,
    checkpoint_tensors,
    tied_copy,
    weight_files,
    weights,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {FIRST: {"a": (2, 3)}, SECOND: {"b": (4,)}}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of bf16 and their index."""
    for name, shapes in SHARDS.items():
        save_file({tensor: torch.ones(shape).bfloat16() for tensor, shape in shapes.items()}, tmp_path / name)
    placed = {tensor: name for name, shapes in SHARDS.items() for tensor in shapes}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    return tmp_path


def stray(folder: Path, name: str) -> None:
    """A file beside the model's, with one tensor of another dtype and one that the model has not."""
    save_file({"a": torch.zeros(2, 3), "c": torch.zeros(5)}, folder / name)


@pytest.mark.parametrize(
    "name",
    ["model-00003-of-00003.safetensors", "consolidated.safetensors", "adapter_model.safetensors", ".x.safetensors"],
)
def test_what_lies_beside_the_index_is_none_of_the_model_s(folder: Path, name: str):
    before = fingerprint(folder)
    stray(folder, name)
    assert [file.name for file in weight_files(folder)] == sorted(SHARDS)
    assert checkpoint_shapes(str(folder)) == {"a": (2, 3), "b": (4,)}
    assert set(checkpoint_dtypes(str(folder)).values()) == {torch.bfloat16}, "no old copy decides"
    assert {name: tensor.sum() for name, tensor in checkpoint_tensors(str(folder))} == {"a": 6, "b": 4}
    assert fingerprint(folder) == before


def test_vllm_reads_the_same_files(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Its loader's files, and what it tells the dtype from where config.json names none."""
    pytest.importorskip("vllm")
    import vllm.transformers_utils.config as reader
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from tasks.rollout.arguments import engine_arguments
    from tasks.rollout.config import RolloutConfig
    from tasks.rollout.weights.loader import know_the_models_own_files

    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        stray(folder, name)
    arguments = engine_arguments(str(folder), RolloutConfig(), routes=False)
    assert arguments["config_format"] == arguments["tokenizer_mode"] == "hf"
    loader = DefaultModelLoader(LoadConfig(load_format=arguments["load_format"]))
    _, files, _ = loader._prepare_weights(str(folder), None, None, True, None)
    assert sorted(Path(file) for file in files) == weight_files(folder)

    monkeypatch.setattr(reader, "_read_safetensors_metadata_in_dir", reader._read_safetensors_metadata_in_dir)
    assert reader.get_safetensors_params_metadata(str(folder)).keys() == {"a", "b", "c"}
    know_the_models_own_files()
    know_the_models_own_files()
    assert {name: held["dtype"] for name, held in reader.get_safetensors_params_metadata(str(folder)).items()} == {
        "a": "BF16",
        "b": "BF16",
    }


def test_one_file_needs_no_index(tmp_path: Path):
    stray(tmp_path, SINGLE)
    assert weight_files(tmp_path) == [tmp_path / SINGLE]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], f"neither {INDEX}, which names"),
        (["consolidated.safetensors"], f"there is consolidated.safetensors, but neither {INDEX}"),
        (
            [SINGLE, "adapter_model.safetensors"],
            rf"adapter_model.safetensors lies beside {SINGLE}, and no {INDEX} says",
        ),
    ],
)
def test_without_an_index_only_model_safetensors_is_a_model(tmp_path: Path, files: list[str], message: str):
    for name in files:
        stray(tmp_path, name)
    with pytest.raises(BadInput, match=message):
        weight_files(tmp_path)


def test_two_models_in_one_folder_are_refused(folder: Path):
    """transformers prefers the single file, vLLM and Megatron-Bridge the index."""
    stray(folder, SINGLE)
    with pytest.raises(BadInput, match=f"{SINGLE} lies beside {INDEX}, which does not name it"):
        weight_files(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "3.safetensors"}, "1 of 1 weight files are missing, e.g. 3.safetensors"),
        ({"a": FIRST, "c": FIRST}, rf"{INDEX} places c in {FIRST}, which has none"),
        ({"a": SECOND, "b": SECOND}, rf"{INDEX} places a in {SECOND}, which has none"),
        ({"a": SECOND, "b": FIRST}, rf"{FIRST} has the tensor a, which {INDEX} places in"),
        ({"b": FIRST}, rf"{FIRST} has the tensor a, which {INDEX} does not name"),
        ({"a": "weights.bin"}, "has no weight_map of tensors to files"),
        ({}, "has no weight_map of tensors to files"),
    ],
)
def test_an_index_that_is_not_the_files_is_refused(folder: Path, weight_map: dict[str, str], message: str):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadInput, match=message):
        weights(folder)


def test_fingerprints_of_before_stay(tmp_path: Path):
    """A run's identity: of one file, and of shards with their index."""
    for name, text in {
        "config.json": "{}",
        "tokenizer.json": "[]",
        "chat_template.jinja": "x",
        "notes.md": "?",
    }.items():
        (tmp_path / name).write_text(text)
    save_file({"a": torch.arange(6.0)}, tmp_path / SINGLE)
    assert fingerprint(tmp_path) == "567f688f5432b083beae1c73e5a492a43739df31f669c7aa31e2aaed0da1db03"
    (tmp_path / SINGLE).rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert fingerprint(tmp_path) == "b7b3c4fa168a83d7a28abfe57f292c2f3d0010053f7707ce144159050c749be0"


def tied(folder: Path, config: dict[str, object], head: Tensor) -> Path:
    """A model of one matrix, and what its files have as its output layer."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file({EMBEDDING: torch.arange(12.0).view(4, 3), HEAD: head, "b": torch.ones(1)}, folder / SINGLE)
    return folder


TIED = {"tie_word_embeddings": True}
COPY = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize(
    ("config", "ties"),
    [
        (TIED, True),
        ({"text_config": TIED}, True),
        ({"model_type": "gemma2"}, True),  # its class's default
        ({"tie_word_embeddings": False}, False),
        ({"model_type": "llama"}, False),
        ({"model_type": "beam"}, False),
    ],
)
def test_a_tied_embedding_is_one_tensor_however_often_it_is_stored(
    tmp_path: Path, config: dict[str, object], ties: bool
):
    tied(tmp_path, config, COPY)
    assert tied_copy(tmp_path) == (HEAD if ties else None)
    own = {EMBEDDING, "b"} if ties else {EMBEDDING, "b", HEAD}
    assert checkpoint_shapes(str(tmp_path)).keys() == own
    assert dict(checkpoint_tensors(str(tmp_path))).keys() == own


@pytest.mark.parametrize(
    ("head", "how"),
    [
        (COPY + 1e-6, "other values"),
        (COPY.bfloat16(), r"BF16 \[4, 3\] instead of F32 \[4, 3\]"),
        (COPY[:3].clone(), r"F32 \[3, 3\] instead of F32 \[4, 3\]"),
    ],
)
def test_a_head_of_its_own_in_a_tied_model_is_refused(tmp_path: Path, head: Tensor, how: str):
    tied(tmp_path, TIED, head)
    with pytest.raises(BadInput, match=rf"{HEAD} is not {EMBEDDING} \({how}\): set tie_word_embeddings to false"):
        weights(tmp_path)
    tied(tmp_path, {"tie_word_embeddings": False}, head)
    assert HEAD in weights(tmp_path)
