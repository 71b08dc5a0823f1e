"""The two passes over all elements, compiled: which elements changed, and which will change.

Elements are grouped into buckets by their parent's exponent. A change is an event (bucket, gap, step): `gap` counts the
bucket's elements since its last change (1: the very next), `step` is the distance from the old to the new word in units
in the last place, with signed numbers laid out in their order (-0 next to +0), modulo the word's range. So every pattern
of bits, NaN and infinity included, goes to every other by exactly one step.
"""

import numpy as np
from numba import njit

BUCKETS = 256
_NEVER = 1 << 62


@njit(cache=True, nogil=True, inline="always")
def _ordered(word, sign, full):
    """A word's place in the order of its numbers: negative ones run backwards."""
    if sign == 0:
        return word
    return full - word if word & sign else word + sign


@njit(cache=True, nogil=True, inline="always")
def _step(old, new, sign, full):
    step = _ordered(new, sign, full) - _ordered(old, sign, full)
    half = (full >> 1) + 1
    if step >= half:
        step -= full + 1
    elif step < -half:
        step += full + 1
    return step


@njit(cache=True, nogil=True)
def find_events(old, new, sign, shift, mask, full, buckets, gaps, steps, sizes):
    """Fill buckets, gaps, steps (capacity len(old)) in the elements' order; returns their number.

    old, new: words [n]; sizes: int64 [BUCKETS], set to the elements in each bucket.
    """
    since = np.zeros(BUCKETS, np.int64)
    sizes[:] = 0
    found = 0
    for i in range(len(old)):
        word = np.int64(old[i])
        bucket = (word >> shift) & mask
        since[bucket] += 1
        if old[i] != new[i]:
            buckets[found] = bucket
            gaps[found] = since[bucket]
            steps[found] = _step(word, np.int64(new[i]), sign, full)
            sizes[bucket] += since[bucket]
            since[bucket] = 0
            found += 1
    for bucket in range(BUCKETS):
        sizes[bucket] += since[bucket]
    return found


@njit(cache=True, nogil=True)
def place_events(old, sign, shift, mask, full, starts, gaps, steps, positions, values):
    """The inverse: positions (ascending) and new words of all changes. Returns their number, -1 if they do not fit.

    starts: int64 [BUCKETS + 1]; a bucket's gaps and steps lie at starts[bucket]:starts[bucket + 1].
    positions, values: of capacity len(gaps).
    """
    left = np.full(BUCKETS, _NEVER, np.int64)
    at = starts[:BUCKETS].copy()
    for bucket in range(BUCKETS):
        if starts[bucket] < starts[bucket + 1]:
            left[bucket] = gaps[starts[bucket]]
    found = 0
    for i in range(len(old)):
        word = np.int64(old[i])
        bucket = (word >> shift) & mask
        left[bucket] -= 1
        if left[bucket] == 0:
            event = at[bucket]
            place = (_ordered(word, sign, full) + steps[event]) & full
            if sign:
                place = full - place if not place & sign else place - sign
            positions[found] = i
            values[found] = place
            found += 1
            at[bucket] = event + 1
            left[bucket] = gaps[event + 1] if event + 1 < starts[bucket + 1] else _NEVER
    return found if found == len(gaps) else -1
