"""Whatever dies, and wherever: an engine holds a committed version, and after a retry the trainer's, bit for bit.

Random chains of versions (full, deltas with anchors, adapters), of random dtypes and sizes of steps, go from a trainer to
two engines through a store whose process dies between any two writes or loses a reply, and through applies that break off.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.policy.codec.layout import words
from infra.policy.follow import follow
from infra.policy.version import describe, digest_tensors
from infra.runs.run import Head, Run
from infra.runs.stages import Stage
from infra.storage import tombstones
from infra.storage.store import Store
from tasks.rollout.weights.sparse_update import Patch
from tasks.sync import retention
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.support.store_faults import Died, DyingFiles
from tests.support.tensor_engine import TensorEngine, TensorTrainer

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""A store in memory: thousands of writes would wait for a disk otherwise."""


class BrokenOff(RuntimeError):
    """What a kernel might raise in the middle of an apply."""


class World:
    """A run's trainer, store and engines, driven as the train flow drives them."""

    def __init__(
        self, folder: str, dtypes: list[torch.dtype], config: SyncConfig, wide: bool, seed: int, adapter: bool = False
    ):
        self.files = DyingFiles()
        self.run = Run(store=f"file://{folder}/store", name="r")
        self.config, self.generator = config, np.random.default_rng(seed)
        tensors = {f"t{i}": self.any_bits(dtype, (3 + 7 * i, 11)) for i, dtype in enumerate(dtypes)}
        self.trainer = TensorTrainer(tensors, ADAPTER if adapter else None)
        # An engine in float32 holds bf16 exactly, NaNs included; float16 and fp8 may change a NaN's payload.
        widened = torch.float32 if wide and set(dtypes) <= {torch.bfloat16, torch.float32} else None
        self.make_engine: Callable[[], TensorEngine] = lambda: TensorEngine(tensors, widened)
        self.engines = [self.make_engine(), self.make_engine()]
        self.expected: dict[str, dict[str, torch.Tensor]] = {}
        self.head: Head | None = None
        self.updates = 0

    def any_bits(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        raw = self.generator.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)

    def train(self, share: float) -> None:
        """Some elements go some ulps further, a few anywhere."""
        self.updates += 1
        for tensor in self.trainer.tensors.values():
            flat = words(tensor)
            moved = self.generator.random(len(flat)) < share
            flat[moved] += self.generator.integers(0, 3, int(moved.sum())).astype(flat.dtype)
            jumped = self.generator.random(len(flat)) < share / 10
            flat[jumped] = words(self.any_bits(tensor.dtype, (len(flat),)))[jumped]

    def sync(self) -> None:
        """Publish the trainer's policy, have every engine follow, move the head, collect."""
        number = self.head.step + 1 if self.head else 0
        parent = self.head.policy if self.head else None
        ref = commit(self.trainer, self.stage(number), self.config, parent)
        for engine in self.engines:
            follow(engine, ref)
        self.head = self.run.advance(self.head, Head(step=number, update=ref, policy=ref))
        retention.drop_old_versions(self.run, ref, self.config.keep_versions)

    def stage(self, number: int) -> Stage:
        return self.run.stage("policy", number, [], settings=str(self.updates))

    def is_committed(self) -> bool:
        """Whether the head is the policy after the last update."""
        return self.head is not None and self.head.policy == self.stage(self.head.step).committed()

    def remember(self) -> None:
        digest = digest_tensors(self.trainer.export())
        self.expected[digest] = {name: tensor.clone() for name, tensor in self.trainer.tensors.items()}

    def check_engines(self) -> None:
        """Each holds the committed version that it says it holds, every bit of it."""
        for engine in self.engines:
            if engine.version is None:
                assert all(not words(tensor).any() for tensor in engine.memory.values()), "untouched"
                continue
            for name, tensor in self.expected[engine.version].items():
                held = engine.words(name, tensor.dtype)
                assert held is not None and np.array_equal(held, words(tensor)), name

    def check_store(self) -> None:
        """The head can be read by an engine that has just started, and is what was trained."""
        self.files.revive()
        head = self.run.head()
        if head is None:
            return
        fresh = self.make_engine()
        follow(fresh, head.policy)
        for name, tensor in self.expected[describe(head.policy).policy_digest].items():
            held = fresh.words(name, tensor.dtype)
            assert held is not None and np.array_equal(held, words(tensor)), name

    def check_collected(self) -> None:
        """After a collection of which nothing dies, but tombstones only version 0, the last ones and what they are made of are left."""
        assert self.head is not None
        retention.drop_old_versions(self.run, self.head.policy, self.config.keep_versions)
        first, each = max(0, self.head.step + 1 - self.config.keep_versions), self.config.anchor_every
        if self.config.form == "auto" and self.trainer.config is None:
            first = first // each * each
        steps = Store.at(self.run.store) / "runs/r/steps"
        folders = {tuple(key.split("/")[:2]) for key in steps.keys() if not is_tombstone(steps, key)}
        numbers = sorted(int(number) for number, _ in folders)
        assert numbers == sorted({0, *range(first, self.head.step + 1)})


def is_tombstone(store: Store, key: str) -> bool:
    folder, _, name = key.rpartition("/")
    return name == "manifest.json" and tombstones.find(store / folder) is not None


FAULTS = st.one_of(
    st.none(),
    st.tuples(st.just("store"), st.integers(0, 14), st.booleans()),
    st.tuples(st.just("apply"), st.integers(0, 9), st.booleans()),
)
STEPS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.02, 0.3, 1.0]), FAULTS, st.sampled_from(["keep", "trainer", "engine", "both"])),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
    anchor_every=st.integers(1, 4),
    keep_versions=st.integers(1, 3),
    form=st.sampled_from(["auto", "auto", "full", "adapter"]),
    wide=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    steps=STEPS,
)
def test_engines_hold_committed_versions_only_and_in_the_end_the_trainers(
    dtypes: list[torch.dtype], anchor_every: int, keep_versions: int, form: Any, wide: bool, seed: int, steps: list[Any]
) -> None:
    adapter = form == "adapter"
    config = SyncConfig(anchor_every=anchor_every, keep_versions=keep_versions, form="auto" if adapter else form)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        world = World(folder, dtypes, config, wide, seed, adapter)
        with mock.patch.object(Store, "backend", property(lambda _: world.files)):
            for share, fault, lost in steps:
                world.train(share)
                world.remember()
                if fault is not None:
                    broken(world, fault)
                    world.check_engines()
                    world.check_store()
                    lose(world, lost)
                    world.head = world.run.head()
                    if world.is_committed():
                        continue  # only a last reply was lost
                world.sync()
                world.check_engines()
                now = digest_tensors(world.trainer.export())
                assert [engine.version for engine in world.engines] == [now, now]
            world.check_store()
            world.check_collected()


def broken(world: World, fault: tuple[str, int, bool]) -> None:
    kind, at, flag = fault
    if kind == "store":
        world.files.revive(at, replies=flag)
        with suppress(Died):
            world.sync()
        world.files.revive()
        return
    left = [at]
    write = Patch.write

    def breaking(self: Patch, values: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] == -1:
            if flag:
                write(self, values)
            raise BrokenOff("in the middle of an apply")
        write(self, values)

    with mock.patch.object(Patch, "write", breaking), suppress(BrokenOff):
        world.sync()


def lose(world: World, lost: str) -> None:
    """A process that dies forgets what it holds. The trainer's new ones are more, or fewer."""
    if lost in ("trainer", "both"):
        world.trainer.become(len(world.trainer.members) % 3 + 1)
    if lost in ("engine", "both"):
        world.engines[1] = world.make_engine()


def test_every_place_to_die_in_one_step() -> None:
    """Not by chance: each write of a step with a new anchor and a collection, died before and after."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        die_everywhere(folder)


def die_everywhere(folder: str) -> None:
    config = SyncConfig(anchor_every=2, keep_versions=1)
    for replies in (True, False):
        for at in range(40):
            world = World(f"{folder}/{replies}{at}", [torch.bfloat16, torch.float32], config, False, at)
            with mock.patch.object(Store, "backend", property(lambda _, world=world: world.files)):
                for _ in range(4):
                    world.remember()
                    world.sync()
                    world.train(0.1)
                world.remember()
                world.files.revive(at, replies)
                try:
                    world.sync()
                    died = False
                except Died:
                    died = True
                world.check_engines()
                world.check_store()
                if not died:
                    break
                world.head = world.run.head()
                if not world.is_committed():
                    world.sync()
                world.check_engines()
                world.check_store()
                world.check_collected()
        assert at > 5, "a step has several writes"
