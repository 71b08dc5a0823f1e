"""Random chains of versions into real vLLM: after every step it holds a committed version, bit for bit, and computes so.

A model's weights take few states, whose logprobs are recorded once, from vLLM's own loader and a fresh engine; versions in
random forms go from state to state.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from infra.models.checkpoint import checkpoint_shapes
from infra.numerics.mxfp8 import Mxfp8Config, dequantize_tensors, quantize_tensors, quantized_names
from infra.policy.follow import follow, prefetch
from infra.policy.version import describe, digest_tensors, tensor_digest
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tasks.rollout.weights.sparse_update import Patch
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.support import tiny_models
from tests.support.tensor_engine import TensorTrainer
from tests.support.vllm_engines import Maker
from tests.unit.tasks.sync.test_crashes import BrokenOff

SETTINGS = RolloutConfig(kv_cache_gib=0.05, dtype="float32")
STATES = 4
PROBE = [[5, 9, 200, 33, 17] * 5]
FORMS = {
    "full": SyncConfig(form="full"),
    "anchor": SyncConfig(anchor_every=1),
    "delta": SyncConfig(anchor_every=1000),
}


class Family(NamedTuple):
    """A kind of model and of engine."""

    make: Maker
    has_slots: bool = True
    mxfp8: Mxfp8Config | None = None


FAMILIES = {
    "dense": Family(tiny_models.dense),
    "experts": Family(tiny_models.experts),
    "experts of unknown layout": Family(tiny_models.experts, has_slots=False),
    "dense in MXFP8": Family(tiny_models.dense, mxfp8=Mxfp8Config(emulation=True)),
}


class World:
    """An engine, and states of the weights: what a version holds of each, and what the engine then must hold and compute."""

    def __init__(self, family: Family, root: Path):
        folder = family.make(root / "model", 0)
        weights = {
            name: tensor if name.endswith("mlp.gate.weight") else tensor.bfloat16()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        quantised = quantized_names(checkpoint_shapes(folder), family.mxfp8) if family.mxfp8 else []
        with (
            nullcontext()
            if family.has_slots
            else mock.patch("tasks.rollout.weights.loader.find_slots", return_value={})
        ):
            self.engine = RolloutEngine(str(folder), SETTINGS, mxfp8=family.mxfp8)
        self.states: list[dict[str, torch.Tensor]] = []
        self.held: list[dict[str, str]] = []
        self.logprobs: list[list[list[float]]] = []
        loader = self.engine._sink._sink if self.engine.loads_whole else self.engine._sink
        for number in range(STATES):
            generator = torch.Generator().manual_seed(number)
            for tensor in weights.values():
                tensor.copy_(tensor.float() + 2e-3 * torch.randn(tensor.shape, generator=generator))
            state = {n: t.clone() for n, t in quantize_tensors(weights.items(), quantised)}
            self.states.append(state)
            self.held.append({n: tensor_digest(t.float()) for n, t in dequantize_tensors(state.items())})
            with mock.patch.object(loader, "slots", {}):  # vLLM's own loader
                self.engine.apply(state.items(), f"state {number}")
            self.logprobs.append(self.engine.token_logprobs(PROBE))
        last = shutil.copytree(folder, root / "last")
        save_file(weights, last / "model.safetensors", {"format": "pt"})
        self.fresh = RolloutEngine(str(last), SETTINGS, mxfp8=family.mxfp8)
        assert self.fresh.token_logprobs(PROBE) == self.logprobs[-1] and len({str(p) for p in self.logprobs}) == STATES
        self.digests = [digest_tensors(state.items()) for state in self.states]

    def close(self) -> None:
        self.fresh.close()
        self.engine.close()

    def publish(self, folder: str, versions: list[tuple[int, str]]) -> list[ArtifactRef]:
        """Versions of these states, in these forms."""
        run, trainer, refs = Run(store=f"file://{folder}", name="r"), TensorTrainer({}), list[ArtifactRef]()
        for number, (state, form) in enumerate(versions):
            trainer.tensors = {name: tensor.clone() for name, tensor in self.states[state].items()}
            parent = refs[-1] if refs else None
            refs.append(commit(trainer, run.stage("policy", number, []), FORMS[form], parent))
        return refs

    def follow(self, ref: ArtifactRef) -> None:
        """An engine that loads whole policies loads one, over however many versions it goes."""
        sink = self.engine._sink
        with mock.patch.object(sink, "commit", wraps=sink.commit) as commits:
            follow(self.engine, ref)
        assert not self.engine.loads_whole or commits.call_count <= 1

    def check(self) -> None:
        """What the engine says that it holds, its memory holds and its kernels multiply."""
        state = self.digests.index(self.engine.version or "")
        assert self.engine.digests() == self.held[state]
        assert self.engine.token_logprobs(PROBE) == self.logprobs[state]

    @contextmanager
    def breaking(self, at: int) -> Iterator[None]:
        """An apply breaks off after so many tensors, be they patched or loaded."""
        left, write = [at], Patch.write
        model: Any = self.engine._llm.collective_rpc(lambda worker: worker.model_runner.model)[0]
        load = type(model).load_weights

        def breaking_write(patch: Patch, values: torch.Tensor) -> None:
            left[0] -= 1
            write(patch, values)
            if left[0] == -1:
                raise BrokenOff("in the middle of an apply")

        def breaking_load(model: Any, tensors: Any) -> None:
            load(model, list(tensors)[: at + 1])
            raise BrokenOff("in the middle of loading")

        with (
            mock.patch.object(Patch, "write", breaking_write),
            mock.patch.object(type(model), "load_weights", breaking_load),
        ):
            yield


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(FAMILIES[request.param], tmp_path_factory.mktemp("world"))
    yield made
    made.close()


VERSIONS = st.lists(st.tuples(st.integers(0, STATES - 1), st.sampled_from(sorted(FORMS))), min_size=3, max_size=6)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["follow", "prefetch", "break"]), st.integers(0, 5), st.integers(0, 5), st.integers(0, 25)
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
@given(versions=VERSIONS, actions=ACTIONS)
def test_vllm_holds_committed_versions_bit_for_bit_and_computes_with_them(
    world: World, versions: list[tuple[int, str]], actions: list[tuple[str, int, int, int]]
) -> None:
    """Engines go on and back by any number of versions, from what another run's chain left them with, too."""
    with tempfile.TemporaryDirectory() as folder:
        refs = world.publish(folder, versions)
        world.follow(refs[0])
        world.check()
        for kind, first, second, at in actions:
            target, other = (refs[number % len(refs)] for number in (first, second))
            if kind == "prefetch":  # thrown away, if it was for another
                prefetch(world.engine, other)
            if kind == "break":
                before = world.engine.version
                with world.breaking(at):
                    try:
                        world.follow(target)
                    except BrokenOff:
                        assert not world.engine.loads_whole or world.engine.version == before
                world.check()
            world.follow(target)
            assert world.engine.version == describe(target).policy_digest
            world.check()
