"""Rows of words of which many changed: a token for every element, in order, and two elements in one symbol.

A token is the folded step, or says that the step is far, and stored apart. Nothing is sorted, and no place is coded. What
is known of an element is its group: parents' exponents cut into a few ranges, by what a sample of the row shows. A
symbol's table is that of its two elements' groups. Its elements are half a block apart, so that loops go straight
through memory and the compiler makes vectors of them; blocks stay in a processor's cache.
"""

import struct
from collections.abc import Iterator

import numpy as np
from numba import njit

from infra.policy.codec import rans, scan
from infra.policy.codec.layout import Layout
from infra.policy.codec.packing import pack, scratch, unpack

_HEADER = "<IIII"  # changes; far steps; bytes of the packed head, and of the far steps' packed high bytes
_FAR = 15
"""The token of steps from here on: the highest that half a byte holds."""
_GROUPS = 4
_HALF = 1 << 13
"""Elements of half a block."""
PIECE = 8 * 2 * _HALF
"""Words that are tokenised while they are in a processor's second cache."""
_BITS = 10
"""Of probabilities: the tables of all contexts fit into a processor's nearest caches."""
_ZSTD = -1
"""Level for the tables and the high bytes of far steps: little, or mostly 0. Of their low bytes nothing is to be had."""
_NIBBLES, _DIGITS = np.uint64(0x1111111111111111), np.uint64(0x0123456789ABCDEF)
_INDEX, _GATHER, _TOP = np.uint32, np.uint64(0x0102040810204080), np.uint64(56)  # eight bytes of 0 or 1 to their bits
_NUMBERS = np.array([bits.bit_count() for bits in range(256)])
"""How many bits are set, of eight."""
_PLACES = np.array([sorted(range(8), key=lambda k: not bits >> k & 1) for bits in range(256)], np.uint8)
"""Which bits are, and then the others."""


def sample(old: np.ndarray, new: np.ndarray, layout: Layout) -> tuple[np.ndarray, float]:
    """Of words [n > 0]: how many have each exponent and token, int64 [BUCKETS, 16], and which share changed."""
    seen = np.zeros((scan.BUCKETS, _FAR + 1), np.int64)
    _count_tokens(old, new, layout.sign_word, layout.shift, layout.mask, seen)
    return seen, 1 - seen[:, 0].sum() / seen.sum()


def encode(pieces: Iterator[tuple[np.ndarray, np.ndarray]], size: int, layout: Layout, seen: np.ndarray) -> bytes:
    """What makes the new of the old words of a row: pieces (old, new) of PIECE words, the last one of fewer, `size` > 0 in
    all; seen: a sample of theirs. May be bigger than the words."""
    cuts = np.full(_GROUPS - 1, scan.BUCKETS - 1, np.uint8)
    _cut(seen, cuts)
    sign, exponent, edges = _masks(layout, cuts)
    keys, at = scratch("keys", np.uint16, (size + 1) // 2), 0
    counts, far = np.zeros((2, _GROUPS**2 * 256), np.uint32), []
    for old, new in pieces:
        room = scratch("far", layout.dtype, PIECE)
        count = _tokenise(old, new, sign, exponent, edges, keys[at : at + PIECE // 2], counts, room)
        far.append(room[:count].copy())
        at += PIECE // 2
    counts = counts.sum(0).reshape(_GROUPS**2, 256)
    pairs = counts.sum(0).reshape(_FAR + 1, _FAR + 1)
    changed = (
        2 * len(keys) - pairs[0].sum() - pairs[:, 0].sum()
    )  # an odd row's last symbol has a 0 for what is not there
    counts[:, 0] += counts.sum(1) == 0  # every context has a table
    tables = np.array([rans.table(row, _BITS) for row in counts])
    stream = rans.encode(keys, tables, _BITS)
    low, high = _planes(tables)
    head = pack(cuts.tobytes() + low + high, _ZSTD)
    low, *high = _planes(np.concatenate(far))
    rest = pack(b"".join(high), _ZSTD)
    return b"".join([struct.pack(_HEADER, changed, len(low), len(head), len(rest)), head, low, rest, stream])


def decode(view: memoryview, old: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Positions int32 and new words of all changes. ValueError when they do not fit `old`."""
    changed, number, packed, packed_high = struct.unpack_from(_HEADER, view)
    at = struct.calcsize(_HEADER)
    head = unpack(view[at : at + packed])
    at += packed
    low = bytes(view[at : at + number])
    at += number
    far = _from_planes(low + unpack(view[at : at + packed_high]), layout.dtype)
    at += packed_high
    tables = _from_planes(head[_GROUPS - 1 :], np.dtype(np.uint16)).reshape(_GROUPS**2, 256)
    if changed > len(old):
        raise ValueError("a row has more changes than words")
    sign, exponent, edges = _masks(layout, np.frombuffer(head, np.uint8, _GROUPS - 1))
    size = (len(old) + 1) // 2
    contexts = scratch("contexts", np.uint8, size)
    _find_contexts(old, exponent, edges, contexts)
    symbols = scratch("symbols", np.uint8, (size + 7) // 8 * 8)
    symbols[size:] = 0
    rans.decode(view[at:], tables, symbols[:size], contexts, _BITS)
    # Eight positions are written at once.
    positions, values = np.empty(changed + 8, np.int32), np.empty(changed, layout.dtype)
    if not _restore(old, symbols, symbols.view(np.uint64), far, sign, _PLACES, _NUMBERS, positions, values):
        raise ValueError("a row has other changes than it says")
    return positions[:changed], values


def _planes(values: np.ndarray) -> list[bytes]:
    """All the values' lowest bytes, and so on."""
    return [(values >> values.dtype.type(8 * k)).astype(np.uint8).tobytes() for k in range(values.itemsize)]


def _from_planes(planes: bytes, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)


def _masks(layout: Layout, cuts: np.ndarray) -> tuple[np.unsignedinteger, np.unsignedinteger, np.ndarray]:
    """As words: the sign, the exponent, and the exponents above which the groups after the first begin."""
    edges = ((cuts.astype(np.uint32) & layout.mask) << layout.shift).astype(layout.dtype)
    return layout.sign_word, layout.dtype.type(layout.mask << layout.shift), edges


@njit(cache=True, nogil=True, inline="always")
def _token(old, new, sign, dtype):
    return np.uint8(min(scan.folded_step(old, new, sign, dtype), dtype(_FAR)))


@njit(cache=True, nogil=True)
def _count_tokens(old, new, sign, shift, mask, seen):
    """Tokens by bucket."""
    dtype = old.dtype.type
    for i in range(len(old)):
        seen[(np.int64(old[i]) >> shift) & mask, _token(old[i], new[i], sign, dtype)] += 1


@njit(cache=True, nogil=True)
def _entropy(counts):
    """Of all, in bits."""
    bits, total = 0.0, 0
    for count in counts:
        if count:
            bits -= count * np.log2(count)
            total += count
    return bits + total * np.log2(total) if total else 0.0


@njit(cache=True, nogil=True)
def _cut(seen, cuts):
    """Set cuts to the buckets after which to cut, one by one, each where it saves most; what saves nothing stays."""
    below = np.zeros((len(seen) + 1, seen.shape[1]), np.int64)
    for bucket in range(len(seen)):
        below[bucket + 1] = below[bucket] + seen[bucket]
    ends = np.zeros(len(seen) + 1, np.bool_)
    ends[0] = ends[-1] = True
    for turn in range(len(cuts)):
        most, best, begin = 1.0, 0, 0
        for end in range(1, len(ends)):
            if not ends[end]:
                continue
            whole = _entropy(below[end] - below[begin])
            for cut in range(begin + 1, end):
                if seen[cut - 1].any():
                    saved = whole - _entropy(below[end] - below[cut]) - _entropy(below[cut] - below[begin])
                    if saved > most:
                        most, best = saved, cut
            begin = end
        if best:
            ends[best] = True
            cuts[turn] = best - 1


# Loops of few arrays, in words as narrow as the elements': of these the compiler makes vectors.


@njit(cache=True, nogil=True)
def _tokenise_block(old, new, sign, symbols):
    dtype, half, rest = old.dtype.type, len(symbols), len(old) - len(symbols)
    old_second, new_second = old[half:], new[half:]
    for i in range(rest):
        first = _token(old[i], new[i], sign, dtype)
        symbols[i] = first << 4 | _token(old_second[i], new_second[i], sign, dtype)
    if rest < half:
        symbols[rest] = _token(old[rest], new[rest], sign, dtype) << 4


@njit(cache=True, nogil=True)
def _contexts_block(old, exponent, edges, contexts):
    half, rest = len(contexts), len(old) - len(contexts)
    second, low, middle, high = old[half:], edges[0], edges[1], edges[2]
    for i in range(rest):
        a, b = old[i] & exponent, second[i] & exponent
        group = np.uint8(a > low) + np.uint8(a > middle) + np.uint8(a > high)
        contexts[i] = _GROUPS * group + np.uint8(b > low) + np.uint8(b > middle) + np.uint8(b > high)
    if rest < half:
        a = old[rest] & exponent
        contexts[rest] = _GROUPS * (np.uint8(a > low) + np.uint8(a > middle) + np.uint8(a > high))


@njit(cache=True, nogil=True)
def _join_block(symbols, contexts, keys):
    for i in range(len(keys)):
        keys[i] = np.uint16(contexts[i]) << np.uint16(8) | np.uint16(symbols[i])


@njit(cache=True, nogil=True)
def _count_block(keys, counts):
    """counts: uint32 [2, contexts * 256], added to: two sets in turn, so that what recurs need not wait for itself; more
    would not fit into a processor's nearest cache."""
    first, second = counts[0], counts[1]
    for i in range(len(keys) // 2):
        first[keys[_INDEX(2 * i)]] += 1
        second[keys[_INDEX(2 * i + 1)]] += 1
    if len(keys) % 2:
        first[keys[-1]] += 1


@njit(cache=True, nogil=True)
def _tokenise(old, new, sign, exponent, edges, keys, counts, far):
    """Fill keys (symbol | context << 8), of which there are counts as `_count_block` says, and far; returns how many are."""
    contexts, symbols = np.empty(_HALF, np.uint8), np.empty(_HALF, np.uint8)
    found = 0
    for at in range(0, len(old), 2 * _HALF):
        olds, news = old[at : at + 2 * _HALF], new[at : at + 2 * _HALF]
        half = (len(olds) + 1) // 2
        _tokenise_block(olds, news, sign, symbols[:half])
        symbols[half:] = 0
        found = _take_far(olds, news, sign, symbols.view(np.uint64), half, far, found)
        block = keys[at // 2 : at // 2 + half]
        _contexts_block(olds, exponent, edges, contexts[:half])
        _join_block(symbols, contexts, block)
        _count_block(block, counts)
    return found


@njit(cache=True, nogil=True)
def _find_contexts(old, exponent, edges, contexts):
    for at in range(0, len(contexts), _HALF):
        end = min(at + _HALF, len(contexts))
        _contexts_block(old[2 * at : min(2 * end, len(old))], exponent, edges, contexts[at:end])


@njit(cache=True, nogil=True, inline="always")
def _far_tokens(eight):
    """The lowest bits of the half bytes that are _FAR, of eight symbols."""
    pairs = eight & eight >> np.uint64(1)
    return pairs & pairs >> np.uint64(2) & _NIBBLES


@njit(cache=True, nogil=True, inline="always")
def _place(marks, half):
    """(The lowest mark's element, counted from the first one of eight symbols; the other marks.)"""
    others = marks & (marks - np.uint64(1))
    nibble = np.int64(_DIGITS * (marks ^ others) >> np.uint64(60))
    return (nibble >> 1) + (0 if nibble & 1 else half), others


@njit(cache=True, nogil=True)
def _take_far(old, new, sign, eights, half, far, found):
    """Add a block's far steps to those found; returns how many there are now."""
    dtype = old.dtype.type
    for group in range((half + 7) // 8):
        marks = _far_tokens(eights[group])
        while marks:
            place, marks = _place(marks, half)
            i = 8 * group + place
            far[found] = scan.folded_step(old[i], new[i], sign, dtype)
            found += 1
    return found


@njit(cache=True, nogil=True)
def _restore_block(old, symbols, sign, new):
    dtype, half, rest = old.dtype.type, len(symbols), len(old) - len(symbols)
    old_second, new_second = old[half:], new[half:]
    for i in range(half):
        new[i] = scan.stepped(old[i], dtype(symbols[i] >> 4), sign, dtype)
    for i in range(rest):
        new_second[i] = scan.stepped(old_second[i], dtype(symbols[i] & 15), sign, dtype)


@njit(cache=True, nogil=True)
def _differ(old, new, changes):
    for i in range(len(old)):
        changes[i] = old[i] != new[i]
    changes[len(old) :] = 0


@njit(cache=True, nogil=True)
def _keep(eights, begin, places, numbers, positions, found):
    """Add where something changed, by a bit for each of eight elements; returns how many there are now, -1 if that is too
    many."""
    for group in range(len(eights)):
        bits = _INDEX(eights[group] * _GATHER >> _TOP)
        if found + 8 > len(positions):
            return -1
        first, kept = begin + 8 * group, positions[found : found + 8]
        for k in range(8):
            kept[k] = first + places[bits, k]
        found += numbers[bits]
    return found


@njit(cache=True, nogil=True)
def _gather(words, begin, positions, values):
    for k in range(len(positions)):
        values[k] = words[_INDEX(positions[k] - begin)]


@njit(cache=True, nogil=True)
def _restore(old, symbols, eights, far, sign, places, numbers, positions, values):
    """Fill positions and values, of eight more than the changes; whether changes and far steps are as many as they
    should."""
    dtype, taken, found = old.dtype.type, 0, 0
    new, changes = np.empty(2 * _HALF, old.dtype), np.empty(2 * _HALF, np.uint8)
    for at in range(0, len(old), 2 * _HALF):
        words = old[at : at + 2 * _HALF]
        half = (len(words) + 1) // 2
        _restore_block(words, symbols[at // 2 : at // 2 + half], sign, new)
        block = eights[at // 16 :]
        for group in range((half + 7) // 8):
            marks = _far_tokens(block[group])
            while marks:
                place, marks = _place(marks, half)
                i = 8 * group + place
                if taken == len(far) or i >= len(words):
                    return False
                new[i] = scan.stepped(words[i], far[taken], sign, dtype)
                taken += 1
        _differ(words, new, changes)
        groups = changes.view(np.uint64)[: (len(words) + 7) // 8]
        before, found = found, _keep(groups, at, places, numbers, positions, found)
        if not 0 <= found <= len(values):
            return False
        _gather(new, at, positions[before:found], values[before:found])
    return found == len(values) and taken == len(far)
