"""Rows of words of which many changed: a token for every element, in order, under the table of its bucket's context.

No element's place is coded, and nothing is sorted. A context is how often a bucket's elements
change, or how far, in half octaves; it is learnt from a sample of the row, and the row carries the contexts and tables that it uses.
"""

import struct

import numpy as np
import zstandard
from numba import njit

from infra.codec import rans, scan, tokens
from infra.codec.layout import Layout

_HEADER = "<IIIH"  # bytes of the packed tables; words of raw bits; changes; contexts
_RARE = 16
"""Contexts below are of buckets in which few change, by how many; from there on by how far, too."""
_CONTEXTS = _RARE + 68
_BLOCK, _SAMPLED = 1024, 32
"""Of every block of elements, so many are looked at to find the contexts."""
_FAR = 1 << tokens.STEP_EXACT
"""The first token with raw bits."""


def encode(old: np.ndarray, new: np.ndarray, layout: Layout, changed: int) -> bytes:
    """What makes `new` of `old`, words [n > 0] of which `changed` differ. May be bigger than `new`."""
    full = (1 << 8 * layout.word) - 1
    contexts_of, contexts, coded = np.zeros(256, np.uint8), np.empty(len(old), np.uint8), np.empty(len(old), np.uint8)
    _choose_contexts(old, new, layout.sign, layout.shift, layout.mask, full, contexts_of)
    _look_up(old, layout.shift, layout.mask, contexts_of, contexts)
    _fold(old, new, layout.sign, full, coded)
    far = np.flatnonzero(coded == _FAR)
    bits = np.empty(len(far) + 1, np.uint32)
    used_bits = _put_far(old, new, layout.sign, full, far, coded, bits)
    counts = np.zeros((_CONTEXTS, 256), np.uint32)
    _count(coded, contexts, counts)
    tables = np.zeros((_CONTEXTS, 256), np.uint16)
    used = np.flatnonzero(counts.any(1))
    for context in used:
        tables[context] = rans.table(counts[context])
    stream = rans.encode(coded, tables, contexts)
    renamed = np.zeros(_CONTEXTS, np.uint8)
    renamed[used] = np.arange(len(used))
    head = renamed[contexts_of].tobytes() + np.ascontiguousarray(tables[used].view(np.uint8).reshape(-1, 2).T).tobytes()
    packed = zstandard.ZstdCompressor(level=9).compress(head)
    sizes = struct.pack(_HEADER, len(packed), used_bits, changed, len(used))
    return b"".join([sizes, packed, bits[:used_bits].tobytes(), stream])


def decode(view: memoryview, old: np.ndarray, layout: Layout, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions int64 (from `first` on) and new words of all changes. ValueError when they do not fit `old`."""
    packed, used_bits, changed, contexts = struct.unpack_from(_HEADER, view)
    at = struct.calcsize(_HEADER)
    head = np.frombuffer(zstandard.ZstdDecompressor().decompress(view[at : at + packed]), np.uint8)
    at += packed
    bits = np.frombuffer(bytes(view[at : at + 4 * used_bits]), np.uint32)
    tables = np.ascontiguousarray(head[256:].reshape(2, -1).T).view(np.uint16).reshape(contexts, 256)
    if not contexts or head[:256].max() >= contexts or changed > len(old):
        raise ValueError("a row's tables are damaged")
    full, contexts_at = (1 << 8 * layout.word) - 1, np.empty(len(old), np.uint8)
    _look_up(old, layout.shift, layout.mask, head[:256], contexts_at)
    coded = rans.decode(view[at + 4 * used_bits :], tables, len(old), contexts_at)
    new = np.empty(len(old), layout.dtype)
    _unfold(old, coded, layout.sign, full, new)
    far = np.flatnonzero(coded >= _FAR)
    if _get_far(old, layout.sign, full, far, coded, bits, new) != len(bits):
        raise ValueError("a row's raw bits do not fit its tokens")
    positions, values = np.empty(changed + 1, np.int64), np.empty(changed + 1, layout.dtype)  # one that is overwritten
    if _keep_changed(coded, new, first, positions, values) != changed:
        raise ValueError("a row has another number of changes than it says")
    return positions[:changed], values[:changed]


# Loops of few arrays each, so that the compiler makes vectors of them: in one loop they take three times as long.


@njit(cache=True, nogil=True)
def _choose_contexts(old, new, sign, shift, mask, full, contexts_of):
    """contexts_of uint8 [256]: by bucket."""
    sizes, counts, lengths = np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(256, np.int64)
    for begin in range(0, len(old), _BLOCK):
        for i in range(begin, min(begin + _SAMPLED, len(old))):
            word = np.int64(old[i])
            bucket = (word >> shift) & mask
            folded = scan.folded_step(word, np.int64(new[i]), sign, full)
            sizes[bucket] += 1
            if folded:
                counts[bucket] += 1
                # twice the logarithm of the distance, by the bit below the highest
                distance = (folded + 1) >> 1
                length = tokens.bit_length(distance)
                lengths[bucket] += 2 * (length - 1) + (distance << 1 >> length - 1 & 1 if length > 1 else 0)
    context = 0
    for bucket in range(255, -1, -1):  # what was not met in the sample goes with its neighbour
        if sizes[bucket]:
            rate = max(counts[bucket], 0.1) / sizes[bucket]
            if rate > 0.5:
                context = _RARE + int(lengths[bucket] / counts[bucket] + 4 * (1 - rate))
            else:
                context = min(int(-2 * np.log2(rate)), _RARE - 1)
        contexts_of[bucket] = context


@njit(cache=True, nogil=True)
def _look_up(old, shift, mask, contexts_of, contexts):
    for i in range(len(old)):
        contexts[i] = contexts_of[(np.int64(old[i]) >> shift) & mask]


@njit(cache=True, nogil=True)
def _fold(old, new, sign, full, coded):
    """Folded steps, _FAR for those from there on."""
    for i in range(len(old)):
        coded[i] = min(scan.folded_step(np.int64(old[i]), np.int64(new[i]), sign, full), _FAR)


@njit(cache=True, nogil=True)
def _unfold(old, coded, sign, full, new):
    for i in range(len(old)):
        new[i] = scan.stepped(np.int64(old[i]), np.int64(coded[i]), sign, full)


@njit(cache=True, nogil=True)
def _put_far(old, new, sign, full, far, coded, bits):
    """Tokens and raw bits at `far`; returns the words of bits."""
    head, held, count = 0, np.uint64(0), 0
    for i in far:
        folded = scan.folded_step(np.int64(old[i]), np.int64(new[i]), sign, full)
        coded[i], head, held, count = tokens.put(folded, tokens.STEP_EXACT, bits, head, held, count)
    if count:
        bits[head] = np.uint32(held)
        head += 1
    return head


@njit(cache=True, nogil=True)
def _get_far(old, sign, full, far, coded, bits, new):
    """New words at `far`; returns the words of bits used."""
    head, held, count = 0, np.uint64(0), 0
    for i in far:
        folded, head, held, count = tokens.get(np.int64(coded[i]), tokens.STEP_EXACT, bits, head, held, count)
        new[i] = scan.stepped(np.int64(old[i]), folded, sign, full)
    return head


@njit(cache=True, nogil=True)
def _count(coded, contexts, counts):
    """Add how often each token occurs in each context."""
    for i in range(len(coded)):
        counts[contexts[i], coded[i]] += 1


@njit(cache=True, nogil=True)
def _keep_changed(coded, new, first, positions, values):
    """Positions and words of what is not unchanged; returns their number, -1 if there are too many."""
    found = 0
    for i in range(len(coded)):
        positions[found] = first + i
        values[found] = new[i]
        found += coded[i] != 0
        if found == len(positions):
            return -1
    return found
