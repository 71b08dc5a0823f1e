"""How the codec sees a dtype: unsigned words, their order, and the bucket (exponent) that an element belongs to."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Layout:
    """A dtype as words of `word` bytes."""

    word: int
    """Bytes of an element's word: 1, 2 or 4."""
    sign: int
    """Mask of the sign bit of a sign-magnitude number; 0 for integers."""
    shift: int
    """The exponent's lowest bit."""
    mask: int
    """The exponent's bits after the shift; 0: all elements are in one bucket. At most 255."""

    @property
    def dtype(self) -> np.dtype:
        """numpy's unsigned integer of the word."""
        return np.dtype(f"u{self.word}")

    @property
    def sign_word(self) -> np.unsignedinteger:
        """`sign` as a word."""
        return self.dtype.type(self.sign)


_LAYOUTS = {
    torch.bfloat16: Layout(2, 0x8000, 7, 0xFF),
    torch.float16: Layout(2, 0x8000, 10, 0x1F),
    torch.float32: Layout(4, 0x80000000, 23, 0xFF),
    torch.complex64: Layout(4, 0x80000000, 23, 0xFF),
    torch.float8_e4m3fn: Layout(1, 0x80, 3, 0x0F),
    torch.float8_e5m2: Layout(1, 0x80, 2, 0x1F),
    torch.float8_e8m0fnu: Layout(1, 0, 0, 0),
    torch.bool: Layout(1, 0, 0, 0),
    torch.uint8: Layout(1, 0, 0, 0),
    torch.int8: Layout(1, 0, 0, 0),
    torch.uint16: Layout(2, 0, 0, 0),
    torch.int16: Layout(2, 0, 0, 0),
    torch.uint32: Layout(4, 0, 0, 0),
    torch.int32: Layout(4, 0, 0, 0),
    # Eight-byte elements are pairs of words; nothing of a policy is in them but counters.
    torch.float64: Layout(4, 0, 0, 0),
    torch.int64: Layout(4, 0, 0, 0),
    torch.uint64: Layout(4, 0, 0, 0),
}


def layout_of(dtype: torch.dtype) -> Layout:
    """The layout of any dtype of safetensors. KeyError for another."""
    return _LAYOUTS[dtype]


def frozen(words: np.ndarray) -> np.ndarray:
    """A read-only view: compiled code has one type for what it only reads, whoever owns it."""
    view = words[:]
    view.flags.writeable = False
    return view


def words(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bits as its layout's words, flat [n]; a view where it is contiguous and on the CPU."""
    if tensor.numel() == 0:
        return np.empty(0, layout_of(tensor.dtype).dtype)
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().view(layout_of(tensor.dtype).dtype)
