"""Changes of weights in place, all of them or none: prepared while the engine serves, written while it pauses."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from infra.policy.codec.layout import words
from tasks.rollout.weights.slots import Slot

if TYPE_CHECKING:
    from infra.policy.codec.frame import Changes

_SPARSE = 1 / 8
"""Share of a tensor's elements up to which their places are kept, and not the whole tensor."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Patch:
    """New elements of one tensor, in the engine's dtype, and the old ones, to go back to."""

    slot: Slot
    index: torch.Tensor | None
    """int32 or int64 [n]: places in the slot's memory; None: the whole tensor."""
    new: torch.Tensor
    """[n], or the tensor."""
    old: torch.Tensor
    """As `new`."""

    def write(self, values: torch.Tensor) -> None:
        """Put `new` or `old` there."""
        if self.index is not None:
            self.slot.memory[self.index] = values
        elif self.slot.packed is None:
            self.slot.read().copy_(values)
        else:
            self.slot.memory[self.slot.index(torch.arange(values.numel()))] = values.reshape(-1)

    def holds(self, values: torch.Tensor) -> bool:
        """Whether the engine's memory has these very bits there."""
        found = self.slot.read() if self.index is None else self.slot.memory[self.index]
        return torch.equal(bits(found), bits(values))

    @property
    def bytes(self) -> int:
        """Bytes of the engine's memory that it changes."""
        return self.new.nbytes


class NotWritten(RuntimeError):
    """Memory did not take what was written to it; the old weights are back."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: equal bits are equal, NaN or not; 0.0 is not -0.0."""
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


def elements(slot: Slot, positions: torch.Tensor, values: torch.Tensor) -> Patch:
    """Replace single elements. positions (int32 or int64 [n]) in the flat tensor; values [n], exact in the engine's dtype."""
    index = slot.index(positions.to(slot.memory.device))
    return Patch(slot, index, values.to(slot.memory), slot.memory[index])


def difference(slot: Slot, tensor: torch.Tensor) -> Patch | None:
    """Become `tensor` (cast to the engine's dtype); None when it is that already."""
    new, old = tensor.to(slot.memory), slot.read()
    changed = (bits(new) != bits(old)).view(-1)
    count = int(changed.count_nonzero())
    if count == 0:
        return None
    if count > _SPARSE * new.numel():
        return Patch(slot, None, new, old.clone())
    positions = changed.nonzero().view(-1)
    return elements(slot, positions, new.reshape(-1)[positions])


@torch.no_grad()
def write(patches: Iterable[Patch]) -> None:
    """Write all patches and read them back; on any fault the old bits are put back, and the fault is raised."""
    done: list[Patch] = []
    try:
        for patch in patches:
            done.append(patch)
            patch.write(patch.new)
            if not patch.holds(patch.new):
                raise NotWritten(f"a tensor of shape {list(patch.slot.shape)} does not hold what was written to it")
    except BaseException:
        for patch in reversed(done):
            patch.write(patch.old)
        raise


_EXACT = {
    torch.float32: {torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2},
    torch.bfloat16: {torch.float8_e4m3fn, torch.float8_e5m2},
}
"""Engine dtype -> policy dtypes that it holds without loss, its own aside."""


@dataclass
class Update:
    """A policy's changes, ready to be written into an engine."""

    patches: list[Patch]
    wider: dict[str, torch.Tensor]
    """Policy tensors that the engine's dtype cannot hold: kept beside it, or what is relative to them has no base."""
    loaded: list[tuple[str, torch.Tensor]] | None = None
    """All tensors, for vLLM's loader, where there are no slots."""

    @classmethod
    def full(cls, slots: dict[str, Slot], tensors: Iterable[tuple[str, torch.Tensor]]) -> "Update":
        """To become `tensors`, which are all of the model."""
        update = cls([], {})
        for name, tensor in tensors:
            if not _is_exact(slots[name], tensor.dtype):
                update.wider[name] = tensor.to("cpu", copy=True)
            if patch := difference(slots[name], tensor):
                update.patches.append(patch)
        return update

    @classmethod
    def sparse(
        cls,
        slots: dict[str, Slot],
        wider: dict[str, torch.Tensor],
        changes: Iterable[tuple[str, torch.dtype, "Changes"]],
    ) -> "Update":
        """To change single elements."""
        update = cls([], dict(wider))
        for name, dtype, found in changes:
            values, positions = torch.from_numpy(found.values).view(dtype), torch.from_numpy(found.positions)
            update.patches.append(elements(slots[name], positions, values))
            if name in wider:
                update.wider[name] = wider[name].clone()
                update.wider[name].view(-1)[positions] = values
        return update

    @property
    def bytes(self) -> int:
        """Bytes of the engine's memory that change."""
        return sum(patch.bytes for patch in self.patches)


def words_of(slot: Slot, wider: torch.Tensor | None, dtype: torch.dtype) -> "np.ndarray | None":
    """A copy of a tensor's bits as a policy has it in `dtype`; None when the engine's memory does not tell them."""
    if wider is not None:
        return words(wider).copy() if wider.dtype == dtype else None
    if not _is_exact(slot, dtype):
        return None
    held = slot.read()
    if held.dtype == torch.float32 and dtype == torch.bfloat16:  # its upper halves; a cast would rewrite NaNs
        return np.ascontiguousarray(words(held).view(np.uint16)[1::2])
    return words(held.to(dtype, copy=True))


def _is_exact(slot: Slot, dtype: torch.dtype) -> bool:
    return dtype == slot.memory.dtype or dtype in _EXACT.get(slot.memory.dtype, ())
