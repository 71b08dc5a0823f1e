"""Integers as tokens of one byte, for an entropy coder, and raw bits; and events sorted by bucket.

An integer v < 2**EXACT is its own token; above, a token tells its magnitude and the two bits below the highest, and the
rest are raw bits. Streams of tokens are grouped by class: how often a bucket's elements change, in half octaves, or, for
buckets in which most do, how far. So buckets of equal statistics share a table, whatever tensor they are in.

Raw bits are a row of 32-bit words, lowest bits first; a writer's or reader's place is (head, held, bits held): the next
word, and up to 32 bits that are not yet in a word, or not yet taken from one.
"""

import numpy as np
from numba import njit

DENSE = 128
"""Classes from here on code a step for every element (0: unchanged); those below code gaps between changes."""
GAP_EXACT, STEP_EXACT = 4, 7
_SAMPLE = 256
"""Steps of a bucket that its class is made of."""
_LENGTHS = np.array([int(i).bit_length() for i in range(256)], np.uint8)
_32, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@njit(cache=True, nogil=True, inline="always")
def bit_length(value):
    """Of a number below 2**32."""
    if value >> 16:
        return np.int64(_LENGTHS[value >> 24]) + 24 if value >> 24 else np.int64(_LENGTHS[value >> 16]) + 16
    return np.int64(_LENGTHS[value >> 8]) + 8 if value >> 8 else np.int64(_LENGTHS[value])


@njit(cache=True, nogil=True, inline="always")
def put(value, exact, bits, head, held, count):
    """(token, head, held, count): value's token, its raw bits written."""
    if value < (1 << exact):
        return value, head, held, count
    length = bit_length(value)
    raw = length - 3
    held |= np.uint64(value & ((1 << raw) - 1)) << np.uint64(count)
    count += raw
    if count >= 32:
        bits[head] = np.uint32(held & _LOW)
        head += 1
        held >>= _32
        count -= 32
    return (1 << exact) + ((length - exact - 1) << 2) + ((value >> raw) & 3), head, held, count


@njit(cache=True, nogil=True, inline="always")
def get(token, exact, bits, head, held, count):
    """(value, head, held, count) of a token. Where there are no bits left, head passes len(bits)."""
    if token < (1 << exact):
        return np.int64(token), head, held, count
    octave = np.int64(token) - (1 << exact)
    raw = min((octave >> 2) + exact - 2, 30)  # more are in no number's token
    if count < raw:
        if head < len(bits):
            held |= np.uint64(bits[head]) << np.uint64(count)
        head += 1
        count += 32
    value = np.int64(4 | (octave & 3)) << raw | np.int64(held & np.uint64((1 << raw) - 1))
    return value, head, held >> np.uint64(raw), count - raw


@njit(cache=True, nogil=True)
def sort_events(buckets, gaps, steps, n, sizes, starts, classes, sorted_gaps, sorted_steps):
    """Group a segment's n events by bucket, in order within each, and choose each bucket's class.

    starts int64 [257], classes uint8 [256]: bucket b's events are sorted_*[starts[b]:starts[b + 1]].
    """
    counts = np.zeros(256, np.int64)
    for i in range(n):
        counts[buckets[i]] += 1
    starts[0] = 0
    for bucket in range(256):
        starts[bucket + 1] = starts[bucket] + counts[bucket]
    at = starts[:256].copy()
    for i in range(n):
        bucket = buckets[i]
        place = at[bucket]
        at[bucket] = place + 1
        sorted_gaps[place] = gaps[i]
        sorted_steps[place] = steps[i]
    for bucket in range(256):
        begin, count = starts[bucket], counts[bucket]
        if count:
            rate = count / sizes[bucket]
            if rate > 0.3:
                sample = min(count, _SAMPLE)
                length = 0.0
                for i in range(begin, begin + sample):
                    length += np.log2(float((sorted_steps[i] + 1) >> 1))
                classes[bucket] = DENSE + int(2 * length / sample + 2 * (1 - rate))
            else:
                classes[bucket] = int(-2 * np.log2(rate) + 0.5)


@njit(cache=True, nogil=True)
def put_events(gaps, steps, dense, gap_tokens, step_tokens, bits, head, held, count):
    """Tokens of one bucket's events; returns head, held, count.

    dense: step_tokens gets a token for each element up to the last change (sum of gaps), gap_tokens none.
    """
    at, held = 0, np.uint64(held)
    for i in range(len(gaps)):
        zigzag = np.int64(steps[i])
        if dense:
            for _ in range(gaps[i] - 1):
                step_tokens[at] = 0
                at += 1
            step_tokens[at], head, held, count = put(zigzag, STEP_EXACT, bits, head, held, count)
        else:
            gap = np.int64(gaps[i]) - 1
            gap_tokens[at], head, held, count = put(gap, GAP_EXACT, bits, head, held, count)
            step_tokens[at], head, held, count = put(zigzag - 1, STEP_EXACT, bits, head, held, count)
        at += 1
    return head, held, count


@njit(cache=True, nogil=True)
def get_events(dense, gap_tokens, step_tokens, bits, head, held, count, gaps, steps):
    """The inverse, filling gaps and steps; returns (gap tokens used, step tokens used, head, held, count), -1s for
    tokens if it cannot."""
    used, held = 0, np.uint64(held)
    if not dense and len(gap_tokens) < len(gaps):
        return -1, -1, head, held, count
    for i in range(len(gaps)):
        gap = np.int64(0)
        if dense:
            while used < len(step_tokens) and step_tokens[used] == 0:
                gap += 1
                used += 1
        else:
            gap, head, held, count = get(gap_tokens[i], GAP_EXACT, bits, head, held, count)
        if used >= len(step_tokens) or head > len(bits):
            return -1, -1, head, held, count
        zigzag, head, held, count = get(step_tokens[used], STEP_EXACT, bits, head, held, count)
        used += 1
        gaps[i] = gap + 1
        steps[i] = zigzag if dense else zigzag + 1
    if head > len(bits):
        return -1, -1, head, held, count
    return (0 if dense else len(gaps)), used, head, held, count


@njit(cache=True, nogil=True)
def counts(stream):
    """How often each token occurs: int64 [256]."""
    found = np.zeros((4, 256), np.int64)  # in turn, so that a run of one token does not wait for its own count
    whole = len(stream) // 4 * 4
    for i in range(0, whole, 4):
        for lane in range(4):
            found[lane, stream[i + lane]] += 1
    for i in range(whole, len(stream)):
        found[0, stream[i]] += 1
    return found.sum(0)
