"""A policy version's weights on this host's disk: what the next version is coded against.

A scratch file, mapped into memory: the kernel keeps in memory what there is room for and drops the rest, so a trainer or
an engine holds no second copy of the model. The file has no name, so it is gone with the process, however that ends.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from infra.errors import BadInput
from infra.policy.codec.layout import words

if TYPE_CHECKING:
    from infra.storage.artifacts import ArtifactRef

_ALIGN = 64


class Mirror:
    """The tensors of one version, by name, writable. Tensors may not be added."""

    def __init__(self, metas: Mapping[str, tuple[torch.dtype, list[int]]], folder: str | None = None):
        """`metas`: {name: (dtype, shape)}; the content is zeros. The file lies in `folder`, None: TMPDIR's; BadInput when
        there is no room."""
        self.ref: ArtifactRef | None = None
        """The version that this is; None while it is being changed, and whenever it is not whole."""
        self._places: dict[str, tuple[int, torch.dtype, list[int]]] = {}
        size = 0
        for name, (dtype, shape) in metas.items():
            self._places[name] = (size, dtype, list(shape))
            size += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGN) * _ALIGN
        with tempfile.TemporaryFile(dir=folder, prefix="policyflow-") as file:
            try:  # a write into a map of a file that has no room kills the process
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            except OSError as error:
                raise BadInput(
                    f"{folder or tempfile.gettempdir()}: {error.strerror}, for {size / 2**30:.1f} GiB of a policy's "
                    "weights; let TMPDIR be a folder with more room"
                ) from error
            self._map = mmap.mmap(file.fileno(), max(size, 1))

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def names(self) -> list[str]:
        """Of all tensors, as given."""
        return list(self._places)

    def tensor(self, name: str) -> torch.Tensor:
        """A writable view of one tensor."""
        offset, dtype, shape = self._places[name]
        count = int(np.prod(shape))
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(shape)

    def words(self, name: str) -> np.ndarray:
        """A writable view of one tensor's words, flat."""
        return words(self.tensor(name))

    def fill(self, tensors: "Iterable[tuple[str, torch.Tensor]]", ref: "ArtifactRef") -> None:
        """Become the version `ref`, of which `tensors` are all."""
        self.ref = None
        for name, tensor in tensors:
            self.words(name)[:] = words(tensor)
        self.ref = ref
