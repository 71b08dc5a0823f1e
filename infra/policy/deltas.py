"""The files of a delta: tensors in the order of the export, coded in groups against the parent while the next come."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from infra.policy.codec import frame
from infra.policy.codec.layout import Layout, layout_of, words
from infra.storage.manifest import digest_of

if TYPE_CHECKING:
    import torch

    from infra.policy.mirror import Mirror
    from infra.policy.version import Frame
    from infra.storage.artifacts import ArtifactWriter

FRAME_BYTES = 64 * 2**20
"""Of weights in a frame, at most, but for a single bigger tensor; less for small models (`frame_bytes`)."""
FILE_BYTES = 32 * 2**20
_WORKERS, _WAITING = 2, 4
"""Groups that are coded at a time, and that may wait for an earlier one: an embedding takes as long as several."""

_BLOCK = 1 << 20


def frame_bytes(model_bytes: int) -> int:
    """Bytes of weights in a frame: a 24th of the model, so that what is held does not grow with the model's share."""
    return min(FRAME_BYTES, max(model_bytes // 24, 2**20))


@dataclass
class _Group:
    """Tensors of one layout on their way into a frame."""

    layout: Layout
    names: list[str] = field(default_factory=list)
    new: list[np.ndarray] = field(default_factory=list)
    bytes: int = 0


@dataclass
class _Coded:
    digests: dict[str, str]
    """Of the tensors that changed."""
    frames: list[tuple[list[str], bytes]]
    """Tensors and their frame."""


class DeltaFiles:
    """Codes tensors against `parent` and writes `name`-*.bin into `writer`; `parent` becomes the new version on the way.

    At most `_WORKERS` + `_WAITING` groups are held, and one of each layout. `add` may not be called for a tensor that the
    parent lacks.
    """

    def __init__(self, writer: "ArtifactWriter", parent: "Mirror", group_bytes: int, name: str):
        self.writer, self.parent, self.group_bytes, self.name = writer, parent, group_bytes, name
        self.frames: list[Frame] = []
        self.digests: dict[str, str] = {}
        """Of the tensors that changed, by name."""
        self._groups: dict[Layout, _Group] = {}
        """Open ones: a router in fp32 does not end the group of the weights around it."""
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="delta")
        self._pending: list[Future[_Coded]] = []
        self._blob, self._files = bytearray(), 0

    def add(self, name: str, tensor: "torch.Tensor") -> None:
        """Take a tensor; its memory must stay as it is until `finish`."""
        layout = layout_of(tensor.dtype)
        group = self._groups.get(layout)
        if group is not None and group.bytes + tensor.nbytes > self.group_bytes:
            self._submit(layout)
        group = self._groups.setdefault(layout, _Group(layout))
        group.names.append(name)
        group.new.append(words(tensor))
        group.bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left."""
        for layout in list(self._groups):
            self._submit(layout)
        while self._pending:
            self._take()
        self._flush()
        self._pool.shutdown()

    def close(self) -> None:
        """Stop the workers, after a fault."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, layout: Layout) -> None:
        self._pending.append(self._pool.submit(_code, self._groups.pop(layout), self.parent))
        while len(self._pending) > _WORKERS + _WAITING:
            self._take()

    def _take(self) -> None:
        from infra.policy.version import Frame

        coded = self._pending.pop(0).result()
        self.digests |= coded.digests
        for names, data in coded.frames:
            if self._blob and len(self._blob) + len(data) > FILE_BYTES:
                self._flush()
            self.frames.append(Frame(file=self._file(), offset=len(self._blob), bytes=len(data), tensors=names))
            self._blob += data

    def _file(self) -> str:
        return f"{self.name}-{self._files:05d}.bin"

    def _flush(self) -> None:
        if self._blob:
            self.writer.bytes(self._file(), self._blob)
            self._blob, self._files = bytearray(), self._files + 1


def _code(group: _Group, parent: "Mirror") -> _Coded:
    """Runs in a worker: what did not change is neither hashed nor coded."""
    old = [parent.words(name) for name in group.names]
    changed = [index for index, words in enumerate(old) if not _equal(words, group.new[index])]
    olds, news = [old[i] for i in changed], [group.new[i] for i in changed]
    names = [group.names[i] for i in changed]
    digests = {name: digest_of(memoryview(new).cast("B")) for name, new in zip(names, news, strict=True)}
    frames = [(names, frame.encode(olds, news, group.layout))] if changed else []
    for before, after in zip(olds, news, strict=True):
        before[:] = after
    return _Coded(digests, frames)


def _equal(old: np.ndarray, new: np.ndarray) -> bool:
    """By blocks: a comparison makes an array of its own, of half the size of bf16 weights."""
    return all(np.array_equal(old[at : at + _BLOCK], new[at : at + _BLOCK]) for at in range(0, len(old), _BLOCK))
