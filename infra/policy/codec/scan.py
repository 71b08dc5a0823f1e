"""The two passes over all elements, compiled: which elements changed, and which will change.

Elements are grouped into buckets by their parent's exponent. A change is an event (bucket, gap, step): `gap` counts the
bucket's elements since its last change (1: the very next), `step` is the distance from the old to the new word in units
in the last place, with signed numbers laid out in their order (-0 next to +0), modulo the word's range. So every pattern
of bits, NaN and infinity included, goes to every other by exactly one step. Steps are kept folded: 0, -1, 1, -2, ... are
0, 1, 2, 3, ..., below 2**32.
"""

import numpy as np
from numba import njit

BUCKETS = 256
_NEVER = 1 << 62


# Signs of weights and directions of steps are anybody's guess, a processor's too: hence selections and no branches. All is
# done in words as narrow as the elements', of which the compiler makes vectors.


@njit(cache=True, nogil=True, inline="always")
def _ordered(word, sign, zero, ones):
    """A word's place in the order of its numbers: negative ones run backwards."""
    return word ^ (sign | (ones if word & sign else zero))


@njit(cache=True, nogil=True, inline="always")
def folded_step(old, new, sign, dtype):
    """From old to new; all are words of `dtype`."""
    zero, ones = dtype(0), dtype(-1)
    step = dtype(_ordered(new, sign, zero, ones) - _ordered(old, sign, zero, ones))
    # As many steps up, or, from half of the range on, that many fewer than all: down.
    return dtype(dtype(step << 1) ^ (ones if step > ones >> 1 else zero))


@njit(cache=True, nogil=True, inline="always")
def stepped(old, folded, sign, dtype):
    """The word that is a folded step from old."""
    zero, ones = dtype(0), dtype(-1)
    place = dtype(_ordered(old, sign, zero, ones) + ((folded >> 1) ^ (ones if folded & 1 else zero)))
    return dtype(place ^ (sign | (ones if place & sign != sign else zero)))


@njit(cache=True, nogil=True)
def find_events(old, new, sign, shift, mask, buckets, gaps, steps, sizes):
    """Fill buckets, gaps, steps (capacity of the changes and one more) in the elements' order; returns their number.

    old, new: words [n]; sign: the sign bit, a word; buckets uint8, gaps and steps uint32; sizes: int64 [BUCKETS], set to the
    elements in each bucket.
    """
    since, dtype = np.zeros(BUCKETS, np.int64), old.dtype.type
    sizes[:] = 0
    found = 0
    for i in range(len(old)):
        bucket = (np.int64(old[i]) >> shift) & mask
        count = since[bucket] + 1
        since[bucket] = count
        if old[i] != new[i]:
            buckets[found] = bucket
            gaps[found] = count
            steps[found] = folded_step(old[i], new[i], sign, dtype)
            sizes[bucket] += count
            since[bucket] = 0
            found += 1
    for bucket in range(BUCKETS):
        sizes[bucket] += since[bucket]
    return found


@njit(cache=True, nogil=True)
def place_events(old, sign, shift, mask, starts, gaps, steps, positions, values):
    """The inverse: positions (int32, ascending) and new words of all changes. Returns their number, -1 if they
    do not fit.

    starts: int64 [BUCKETS + 1]; a bucket's gaps and steps lie at starts[bucket]:starts[bucket + 1].
    positions, values: of capacity len(gaps).
    """
    left = np.full(BUCKETS, _NEVER, np.int64)
    at = starts[:BUCKETS].copy()
    for bucket in range(BUCKETS):
        if starts[bucket] < starts[bucket + 1]:
            left[bucket] = gaps[starts[bucket]]
    found, dtype = 0, old.dtype.type
    for i in range(len(old)):
        bucket = (np.int64(old[i]) >> shift) & mask
        left[bucket] -= 1
        if left[bucket] == 0:
            event = at[bucket]
            positions[found] = i
            values[found] = stepped(old[i], dtype(steps[event]), sign, dtype)
            found += 1
            at[bucket] = event + 1
            left[bucket] = gaps[event + 1] if event + 1 < starts[bucket + 1] else _NEVER
    return found if found == len(gaps) else -1
