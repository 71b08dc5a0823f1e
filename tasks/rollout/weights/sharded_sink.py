"""A vLLM model over several workers (tensor, expert and pipeline parallelism) as a taker of policies.

Changes are coded against whole tensors, of which a worker holds slices. So the engine keeps the version in a mirror (a
mapped file), decodes against that, and hands the changes to all workers, each of which takes those of its own slices.
Workers write in place and read back; should one fail, all go back.

The functions that take a `worker` run inside each of them (`LLM.collective_rpc`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infra.policy.codec.layout import words
from infra.policy.mirror import Mirror
from infra.policy.version import tensor_digest
from tasks.rollout.weights import loader, sparse_update
from tasks.rollout.weights.slots import Slice

if TYPE_CHECKING:
    from infra.policy.codec.frame import Changes

_log = logging.getLogger(__name__)
_BATCH_BYTES = 64 * 2**20
"""Of positions and values in one message to the workers."""

type Call = Callable[..., list[Any]]
"""`call(function, args=(...))` runs `function(worker, ...)` in every worker and returns what they return, by rank."""
type Part = tuple[str, torch.dtype, torch.Tensor, torch.Tensor]
"""Changes of a tensor: name, dtype, positions int32 or int64 [n] in the flat whole tensor, new elements [n]."""


@dataclass
class ShardedUpdate:
    """A policy's changes, which the workers have ready; or all of its tensors."""

    changes: "list[tuple[str, Changes]]"
    loaded: list[tuple[str, torch.Tensor]] | None = None
    """All tensors, for vLLM's loader."""
    mirror: Mirror | None = None
    """Holds `loaded`."""


class ShardedSink:
    """The model of several vLLM workers; its methods are those of infra.policy.sink.PolicySink."""

    loads_whole = False

    def __init__(self, call: Call, shapes: dict[str, tuple[int, ...]], *, whole_only: bool = False):
        """`shapes`: of the checkpoint's tensors, by name. `whole_only`: versions are always loaded whole.

        `call` may be used beside the engine's work: it waits for the step that is being computed.
        """
        self.shapes = shapes
        self.mirror: Mirror | None = None
        """The version that the workers hold; None when it is not known, or cannot be patched."""
        self._call = call
        self._ready: ShardedUpdate | None = None
        """Whose changes the workers have."""
        self._patchable = not whole_only

    def words(self, name: str, dtype: torch.dtype) -> "np.ndarray | None":
        """As PolicySink's."""
        if self.mirror is None or name not in self.mirror or self.mirror.tensor(name).dtype != dtype:
            return None
        return self.mirror.words(name).copy()

    def prepare(self, changes: "Iterable[tuple[str, torch.dtype, Changes]]") -> ShardedUpdate:
        """As PolicySink's. The workers hold the changes of their slices, old and new, from then on."""
        update = ShardedUpdate([])

        def parts() -> Iterator[Part]:
            for name, dtype, found in changes:
                update.changes.append((name, found))
                yield name, dtype, torch.from_numpy(found.positions), torch.from_numpy(found.values).view(dtype)

        self._ready = None
        self._call(unstage)
        for batch in _batches(parts()):
            loader.raise_first(self._call(stage, args=(batch,)))
        self._ready = update
        return update

    def prepare_whole(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> ShardedUpdate:
        """As PolicySink's. Any float dtype (cast to the engine's); BadInput names a tensor that does not fit the model."""
        complete = loader.collect(tensors, self.shapes)
        if self._patchable and self.mirror is None:
            self._patchable = self._has_slices()
        if not self._patchable:
            return ShardedUpdate([], complete)
        mirror = Mirror({name: (tensor.dtype, list(tensor.shape)) for name, tensor in complete})
        for name, tensor in complete:
            mirror.words(name)[:] = words(tensor)
        return ShardedUpdate([], complete, mirror)

    def commit(self, update: ShardedUpdate, version: str) -> None:
        """Write in place what is new; when it raises, every worker has its old weights back, bit for bit."""
        if update.loaded is not None:
            loader.load_all_or_nothing(self._call, update.loaded)
            self.mirror = update.mirror
            if self.mirror is not None and (wrong := self.differing()):
                _log.warning("versions are loaded whole: slices of %s are not where they were taken to be", wrong[:5])
                self.mirror, self._patchable = None, False
            return
        mirror, self.mirror = self.mirror, None
        assert mirror is not None and update is self._ready, "the changes that were prepared last, against the mirror"
        self._ready = None
        try:
            loader.raise_first(self._call(write))
        except BaseException:
            self._call(write_back)
            self.mirror = mirror
            raise
        self._call(unstage)
        for name, found in update.changes:
            mirror.words(name)[found.positions] = found.values
        self.mirror = mirror

    def differing(self) -> list[str]:
        """Tensors of which some worker's slice is not, by digest, what the mirror has there (in the worker's dtype)."""
        assert self.mirror is not None
        known: dict[tuple[Any, ...], str] = {}
        wrong = set[str]()
        for held in self._call(slice_digests):
            for name, (dim, start, size, dtype, digest) in held.items():
                if (key := (name, dim, start, size, dtype)) not in known:
                    tensor = self.mirror.tensor(name)
                    part = tensor.narrow(dim, start, size) if tensor.dim() else tensor
                    known[key] = tensor_digest(part.to(dtype))
                if known[key] != digest:
                    wrong.add(name)
        return sorted(wrong)

    def _has_slices(self) -> bool:
        """Whether the workers know where their slices lie, and these together are the model."""
        covered: dict[str, set[tuple[int, int, int]]] = {name: set() for name in self.shapes}
        for held in self._call(find_slices, args=(self.shapes,)):
            for name, part in held.items():
                covered[name].add(part)
        return all(_covers(parts, self.shapes[name]) for name, parts in covered.items())


def _covers(parts: set[tuple[int, int, int]], shape: tuple[int, ...]) -> bool:
    """Whether slices (dim, start, size) are all of a tensor: next to each other along one dimension."""
    if not shape:
        return bool(parts)
    end = 0
    for _, start, size in sorted(parts):
        if start != end:
            return False
        end += size
    return len({dim for dim, _, _ in parts}) == 1 and end == shape[next(iter(parts))[0]]


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    batch, size = list[Part](), 0
    for part in parts:
        batch.append(part)
        size += part[2].nbytes + part[3].nbytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def find_slices(worker: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int, int]]:
    """{name: (dim, start, size)} of the worker's slices; empty when kernels keep them in layouts of their own."""
    slots = loader.find_slots(worker)
    found = {name: Slice.of(slots[name], tuple(shape)) for name, shape in shapes.items() if name in slots}
    worker.policy_slices = {name: part for name, part in found.items() if part is not None}
    worker.policy_staged = []
    return {
        name: (part.dim, part.start, part.slot.shape[part.dim] if part.whole else 1)
        for name, part in worker.policy_slices.items()
    }


@torch.no_grad()
def stage(worker: Any, batch: list[Part]) -> loader.Faults:
    """Keep the changes that fall into the worker's slices, with the old elements."""
    try:
        for name, _, positions, values in batch:
            part: Slice | None = worker.policy_slices.get(name)
            if part is not None:
                mine, own = part.own(positions.long())
                worker.policy_staged.append(sparse_update.elements(part.slot, own, values[mine]))
    except Exception as fault:
        return [fault]
    return []


@torch.no_grad()
def write(worker: Any) -> loader.Faults:
    """Write what is staged and read it back; if that fails, the worker's old weights are back."""
    staged, worker.policy_written = worker.policy_staged, False
    try:
        sparse_update.write(staged)
    except Exception as fault:
        return [fault]
    worker.policy_written = True
    return []


@torch.no_grad()
def write_back(worker: Any) -> None:
    """Undo `write`, if it succeeded here, and forget what was staged."""
    if worker.policy_written:
        sparse_update.write(
            [sparse_update.Patch(patch.slot, patch.index, patch.old, patch.new) for patch in worker.policy_staged]
        )
    unstage(worker)


def unstage(worker: Any) -> None:
    """Forget what is staged."""
    worker.policy_staged, worker.policy_written = [], False


def slice_digests(worker: Any) -> dict[str, tuple[int, int, int, torch.dtype, str]]:
    """{name: (dim, start, size, the engine's dtype, digest)} of the worker's slices."""
    return {
        name: (
            part.dim,
            part.start,
            part.slot.shape[part.dim] if part.whole else 1,
            part.slot.memory.dtype,
            tensor_digest(part.slot.read()),
        )
        for name, part in worker.policy_slices.items()
    }
