"""Events as tokens of one byte, for an entropy coder, and raw bits.

An integer v < 2**EXACT is its own token; above, a token tells its magnitude and the two bits below the highest, and the
rest are raw bits. Streams of tokens are grouped by class: how often a bucket's elements change, in half octaves, or, for
buckets in which most do, how far. So buckets of equal statistics share a table, whatever tensor they are in.
"""

import numpy as np
from numba import njit

DENSE = 128
"""Classes from here on code a step for every element (0: unchanged); those below code gaps between changes."""
_GAP_EXACT, _STEP_EXACT = 4, 7


@njit(cache=True, nogil=True, inline="always")
def _bit_length(value):
    length = 0
    while value:
        value >>= 1
        length += 1
    return length


@njit(cache=True, nogil=True)
def sort_events(buckets, gaps, steps, n, sizes, starts, classes, sorted_gaps, sorted_steps):
    """Group a segment's n events by bucket, in order within each, and choose each bucket's class.

    starts int64 [257], classes uint8 [256]: bucket b's events are sorted_*[starts[b]:starts[b + 1]].
    """
    counts = np.zeros(256, np.int64)
    lengths = np.zeros(256, np.float64)
    for i in range(n):
        counts[buckets[i]] += 1
        lengths[buckets[i]] += np.log2(abs(float(steps[i])))
    starts[0] = 0
    for bucket in range(256):
        starts[bucket + 1] = starts[bucket] + counts[bucket]
        if counts[bucket]:
            rate = counts[bucket] / sizes[bucket]
            if rate > 0.3:
                classes[bucket] = DENSE + int(2 * lengths[bucket] / counts[bucket] + 2 * (1 - rate))
            else:
                classes[bucket] = int(-2 * np.log2(rate) + 0.5)
    at = starts[:256].copy()
    for i in range(n):
        place = at[buckets[i]]
        at[buckets[i]] += 1
        sorted_gaps[place] = gaps[i]
        sorted_steps[place] = steps[i]


@njit(cache=True, nogil=True, inline="always")
def _put(value, exact, tokens, at, bits, head):
    """Write value's token at tokens[at] and its raw bits at bit `head`; returns the new head."""
    if value < (1 << exact):
        tokens[at] = value
        return head
    length = _bit_length(value)
    raw = length - 3
    tokens[at] = (1 << exact) + ((length - exact - 1) << 2) + ((value >> raw) & 3)
    rest = value & ((1 << raw) - 1)
    while raw > 0:
        free = 8 - (head & 7)
        take = min(free, raw)
        bits[head >> 3] |= (rest & ((1 << take) - 1)) << (head & 7)
        rest >>= take
        raw -= take
        head += take
    return head


@njit(cache=True, nogil=True, inline="always")
def _get(token, exact, bits, head):
    """(value, new head) of a token."""
    if token < (1 << exact):
        return np.int64(token), head
    octave = np.int64(token) - (1 << exact)
    length = (octave >> 2) + exact + 1
    raw = length - 3
    value = np.int64(4 | (octave & 3)) << raw
    got = 0
    while got < raw:
        free = 8 - (head & 7)
        take = min(free, raw - got)
        value |= ((np.int64(bits[head >> 3]) >> (head & 7)) & ((1 << take) - 1)) << got
        got += take
        head += take
    return value, head


@njit(cache=True, nogil=True)
def put_events(gaps, steps, dense, gap_tokens, step_tokens, bits, head):
    """Tokens of one bucket's events; returns (gap tokens, step tokens, head).

    dense: step_tokens gets a token for each element up to the last change (sum of gaps), gap_tokens none.
    """
    count = 0
    for i in range(len(gaps)):
        zigzag = (steps[i] << 1) ^ (steps[i] >> 63)
        if dense:
            for _ in range(gaps[i] - 1):
                step_tokens[count] = 0
                count += 1
            head = _put(zigzag, _STEP_EXACT, step_tokens, count, bits, head)
        else:
            head = _put(gaps[i] - 1, _GAP_EXACT, gap_tokens, count, bits, head)
            head = _put(zigzag - 1, _STEP_EXACT, step_tokens, count, bits, head)
        count += 1
    return (0 if dense else count), count, head


@njit(cache=True, nogil=True)
def get_events(dense, gap_tokens, step_tokens, bits, head, gaps, steps):
    """The inverse, filling gaps and steps; returns (gap tokens used, step tokens used, head), -1s if it cannot."""
    used = 0
    for i in range(len(gaps)):
        if head + 128 > 8 * len(bits):  # `bits` ends in 16 bytes of padding
            return -1, -1, head
        gap = 1
        if dense:
            while used < len(step_tokens) and step_tokens[used] == 0:
                gap += 1
                used += 1
        elif i >= len(gap_tokens):
            return -1, -1, head
        else:
            gap, head = _get(gap_tokens[i], _GAP_EXACT, bits, head)
            gap += 1
        if used >= len(step_tokens):
            return -1, -1, head
        zigzag, head = _get(step_tokens[used], _STEP_EXACT, bits, head)
        if not dense:
            zigzag += 1
        used += 1
        gaps[i] = gap
        steps[i] = (zigzag >> 1) ^ -(zigzag & 1)
    return (0 if dense else len(gaps)), used, head
