"""A tied model stored with its head, and with files beside the index: what is trained, served and published is the model's."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.errors import BadInput
from infra.models.catalog import check_model_folder
from infra.numerics.tolerance import Limits, difference
from infra.policy.follow import follow
from infra.policy.version import describe, dtype_of
from infra.runs.run import Run
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef
from tasks.publish.check import compare_transformers
from tasks.publish.folder import fetch_model, write_model
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.integration.test_trainer import make_trainer, scored
from tests.support.models import EMBEDDING, HEAD, add_strays, store_head, write_tiny_llama

LIMITS = Limits(1e-4)
SETTINGS = RolloutConfig(kv_cache_gib=0.05, dtype="float32")
FOLDERS = ["plain", "head", "strays"]
SEQUENCES = [[5, 9, 200, 33, 17] * 9, [7, 8, 3, 99, 250] * 9]


def write_folder(kind: str, folder: Path) -> Path:
    """A tied model in bf16. head: its files hold the head too. strays: with an index besides, and files that are another's."""
    write_tiny_llama(folder)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if kind != "plain":
        store_head(folder)
    if kind == "strays":
        add_strays(folder)
    return folder


@dataclass
class Made:
    """Three versions of a trainer on a folder, and the last one as a folder of its own."""

    base: Path
    refs: list[ArtifactRef]
    model: ArtifactRef
    published: Path
    logprobs: list[list[float]]
    """The trainer's, of the last version."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return {kind: make(kind, tmp_path_factory.mktemp(kind)) for kind in FOLDERS}


def make(kind: str, root: Path) -> Made:
    base = write_folder(kind, root / "model")
    check_model_folder(base)
    trainer, run, refs = make_trainer(base), Run(store=f"file://{root}/store", name="r"), list[ArtifactRef]()
    for number in range(3):
        if number:
            trainer.update(scored(number))
        refs.append(commit(trainer, run.stage("policy", number, []), SyncConfig(), refs[-1] if refs else None))
    stage = Stage(store=run.store, folder="models", name="model", inputs=(refs[-1],))
    model = write_model(stage, refs[-1], str(base), {"run": "r", "version": 2})
    return Made(base, refs, model, fetch_model(model, root / "published"), trainer.token_logprobs(SEQUENCES))


def test_versions_are_those_of_the_folder_without_the_extra_files(made: dict[str, Made]):
    """Each tensor once, in the dtype that the folder has it in."""
    versions = {kind: [describe(ref) for ref in made[kind].refs] for kind in FOLDERS}
    assert all(HEAD not in what.tensors and EMBEDDING in what.tensors for of in versions.values() for what in of)
    assert {info.dtype for of in versions.values() for what in of for info in what.tensors.values()} == {"bfloat16"}
    digests = {kind: [what.policy_digest for what in of] for kind, of in versions.items()}
    assert digests["plain"] == digests["head"] == digests["strays"] and len({*digests["plain"]}) == 3


@pytest.fixture(scope="module", params=FOLDERS)
def engine(request: pytest.FixtureRequest, made: dict[str, Made]) -> Iterator[tuple[Made, RolloutEngine]]:
    of = made[request.param]
    engine = RolloutEngine(str(of.base), SETTINGS)
    yield of, engine
    engine.close()


def test_engine_transformers_and_publication_agree_on_what_was_trained(engine: tuple[Made, RolloutEngine]):
    of, follower = engine
    before = follower.token_logprobs(SEQUENCES)
    for ref in of.refs:
        follow(follower, ref)
    model: Any = follower._llm.collective_rpc(lambda worker: worker.model_runner.model)[0]
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied in the engine, too"
    followed = follower.token_logprobs(SEQUENCES)
    assert followed != before
    assert not difference(followed, of.logprobs).beyond(LIMITS)
    what = describe(of.refs[-1])
    dtypes = {name: dtype_of(info) for name, info in what.tensors.items()}
    assert follower.digests(dtypes) == {name: info.digest for name, info in what.tensors.items()}

    fresh = RolloutEngine(str(of.published), SETTINGS)
    try:
        assert fresh.token_logprobs(SEQUENCES) == followed, "bit for bit"
    finally:
        fresh.close()
    assert compare_transformers(of.model, of.refs[-1], SEQUENCES, followed, LIMITS, 300) < 1e-4


def test_nothing_of_the_files_beside_is_published(made: dict[str, Made]):
    names = {kind: {path.name for path in made[kind].published.iterdir()} for kind in FOLDERS}
    assert names["strays"] == names["head"] == names["plain"]
    check_model_folder(made["strays"].published)


def test_a_head_of_its_own_is_refused_before_anything_starts(tmp_path: Path, made: dict[str, Made]):
    """vLLM and transformers would use it, Megatron would train the embedding in its place."""
    folder = shutil.copytree(made["head"].base, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors[HEAD] + 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for refusing in (check_model_folder, make_trainer, lambda folder: RolloutEngine(str(folder), SETTINGS)):
        with pytest.raises(BadInput, match="set tie_word_embeddings to false to train both"):
            refusing(folder)
    assert torch.equal(tensors[HEAD], tensors[EMBEDDING] + 1)
