"""Entropy coding of tokens: interleaved rANS (Duda, arXiv:1311.2540) over static tables, one a context.

The tables are skewed (a step is mostly +-1, an element mostly unchanged), where a Huffman coder wastes a tenth, and the
streams long, where constriction's coders take 30 to 90 ns a token; this takes one or two. Four states, so that a
processor works on four tokens at once; 32-bit states, 16-bit words, probabilities in 4096ths, or, for tables that leave
room in a cache, in 2**bits-ths.
"""

import numpy as np
from numba import njit

from infra.policy.codec.layout import frozen
from infra.policy.codec.packing import scratch

BITS = 12
LANES = 4
_PADDING = 2 * LANES  # words that a decoder may read beyond a stream before it looks
_WORD, _LOW = np.uint64(16), np.uint64(0xFFFF)
_FACTOR, _ADDED, _LIMIT, _SHIFT, _BEGIN, _REST = range(6)
_FACTORS = 8
"""Numbers of a token for `_push`, and the room they take: a power of two, and no more than half a cache line."""
_INDEX = np.uint32  # numba looks at a signed index for its sign


def table(counts: np.ndarray, bits: int = BITS) -> np.ndarray:
    """uint16 [256]: each token's share, at least 1 for what occurs; the sum is 2**bits. counts: [256], not all 0.

    bits: 8 to 12.
    """
    shares = np.zeros(256, np.uint16)
    _share(np.ascontiguousarray(counts, np.int64), bits, shares)
    return shares


def encode(symbols: np.ndarray, tables: np.ndarray, bits: int = BITS) -> bytes:
    """The stream of symbols [n > 0]: tokens, uint8; or uint16, token | context << 8, each under its context's table.

    tables: uint16 [contexts, 256], of `table` with `bits`.
    """
    words = scratch("stream", np.uint16, len(symbols) + 2 * LANES)
    return words[_encode(frozen(symbols), _factors(frozen(tables), bits), words) :].tobytes()


def decode(
    stream: memoryview, tables: np.ndarray, tokens: np.ndarray, contexts: np.ndarray | None = None, bits: int = BITS
) -> None:
    """Fill tokens, uint8 [n]. contexts: uint8 [n]; None: all are under the first table.

    ValueError when the stream ends too early or a table is none.
    """
    if len(stream) < 4 * LANES or len(stream) % 2 or (tables.sum(1) != 1 << bits).any():
        raise ValueError("a stream of tokens is damaged")
    words = scratch("stream", np.uint16, len(stream) // 2 + _PADDING)
    words[:-_PADDING] = np.frombuffer(stream, np.uint16)
    words[-_PADDING:] = 0
    contexts = None if contexts is None else frozen(contexts)
    if _decode(words, _slots(frozen(tables), bits), contexts, bits, tokens) != len(words) - _PADDING:
        raise ValueError("a stream of tokens has another length than its tokens")


@njit(cache=True, nogil=True)
def _share(counts, bits, shares):
    scale, excess = (1 << bits) / counts.sum(), -(1 << bits)
    for token in range(len(counts)):
        if counts[token]:
            shares[token] = max(1, int(np.rint(counts[token] * scale)))
            excess += shares[token]
    while excess:  # taken where it costs least: from the largest
        largest = shares.argmax()
        taken = min(excess, np.int64(shares[largest] // 2)) if excess > 0 else excess
        shares[largest] -= taken
        excess -= taken


@njit(cache=True, nogil=True)
def _slots(tables, bits):
    """uint32 [contexts << bits], for `_pop`: a slot's token, share - 1 << 8, and its place in the share << 20."""
    slots = np.empty(len(tables) << bits, np.uint32)
    at = 0
    for context in range(len(tables)):
        for token in range(256):
            share = np.int64(tables[context, token])
            for place in range(share):
                slots[at] = token | (share - 1) << 8 | place << 20
                at += 1
    return slots


@njit(cache=True, nogil=True)
def _factors(tables, bits):
    """uint32 [contexts * 256, _FACTORS], for `_push`: what a state is multiplied by, what is added and by how much that is
    shifted, to divide it by the share; from where on it spills a word; where the share begins; all other shares.

    Exact for 32-bit states: of the reciprocals rounded up and down one is near enough (Robison, "N-bit unsigned division
    via N-bit multiply-add", 2005)."""
    factors = np.zeros((len(tables) << 8, _FACTORS), np.uint32)
    for context in range(len(tables)):
        begin = 0
        for token in range(256):
            share = np.int64(tables[context, token])
            if share == 0:
                continue
            shift = 31
            while 1 << shift - 31 < share:
                shift += 1
            factor = ((1 << shift) + share - 1) // share
            is_down = np.int64(2 * (factor * share - (1 << shift)) > 1 << shift - 31)
            factor -= is_down
            symbol = context << 8 | token
            factors[symbol, _FACTOR] = factor
            factors[symbol, _ADDED] = factor * is_down
            factors[symbol, _LIMIT] = (share << 32 - bits) - 1
            factors[symbol, _SHIFT] = shift
            factors[symbol, _BEGIN] = begin
            factors[symbol, _REST] = (1 << bits) - share
            begin += share
    return factors


@njit(cache=True, nogil=True, inline="always")
def _push(state, symbol, factors, words, head):
    """(new state, head), words written downwards from head."""
    numbers = factors[_INDEX(symbol)]
    words[_INDEX(head - 1)] = np.uint16(state & _LOW)
    spills = state > numbers[_LIMIT]
    head -= np.int64(spills)
    state >>= np.uint64(spills) << np.uint64(4)
    quotient = (state * np.uint64(numbers[_FACTOR]) + np.uint64(numbers[_ADDED])) >> np.uint64(numbers[_SHIFT])
    return state + np.uint64(numbers[_BEGIN]) + quotient * np.uint64(numbers[_REST]), head


@njit(cache=True, nogil=True)
def _encode(symbols, factors, words):
    """Fills `words` from its end; returns where the stream begins."""
    s0 = s1 = s2 = s3 = np.uint64(1) << _WORD
    head, n = len(words), len(symbols)
    whole = n // LANES * LANES
    for i in range(n - 1, whole - 1, -1):
        if i % LANES == 0:
            s0, head = _push(s0, symbols[i], factors, words, head)
        elif i % LANES == 1:
            s1, head = _push(s1, symbols[i], factors, words, head)
        else:
            s2, head = _push(s2, symbols[i], factors, words, head)
    for group in range(whole // LANES - 1, -1, -1):
        i = group * LANES
        a, b = symbols[_INDEX(i)], symbols[_INDEX(i + 1)]
        c, d = symbols[_INDEX(i + 2)], symbols[_INDEX(i + 3)]
        s3, head = _push(s3, d, factors, words, head)
        s2, head = _push(s2, c, factors, words, head)
        s1, head = _push(s1, b, factors, words, head)
        s0, head = _push(s0, a, factors, words, head)
    for state in (s3, s2, s1, s0):
        head -= 2
        words[head] = np.uint16(state & _LOW)
        words[head + 1] = np.uint16(state >> _WORD)
    return head


@njit(cache=True, nogil=True, inline="always")
def _pop(state, context, slots, bits, words, head):
    """(token, new state, head). Reads words[head], needed or not: `head` is the caller's to check."""
    entry = np.int64(slots[_INDEX((context << bits) + (state & ((1 << bits) - 1)))])
    state = ((entry >> 8 & 0xFFF) + 1) * (state >> bits) + (entry >> 20)
    refills = np.int64(state < 1 << 16)
    state = state << 16 * refills | np.int64(words[_INDEX(head)]) * refills
    return entry & 0xFF, state, head + refills


@njit(cache=True, nogil=True, inline="always")
def _first(words, lane):
    """A lane's state at the stream's beginning."""
    return np.int64(words[2 * lane]) | np.int64(words[2 * lane + 1]) << 16


@njit(cache=True, nogil=True)
def _context(contexts, i):
    """Compiled apart for None: a loop that asked at each token would be slower."""
    if contexts is None:
        return 0
    return np.int64(contexts[_INDEX(i)])


@njit(cache=True, nogil=True)
def _decode(words, slots, contexts, bits, tokens):
    """Fills `tokens`; returns the words used, -1 if there are too few."""
    s0, s1, s2, s3 = _first(words, 0), _first(words, 1), _first(words, 2), _first(words, 3)
    head, limit, n = 2 * LANES, len(words) - _PADDING, len(tokens)
    whole = n // LANES * LANES
    for i in range(0, whole, LANES):
        if head > limit:
            return -1
        tokens[_INDEX(i)], s0, head = _pop(s0, _context(contexts, i), slots, bits, words, head)
        tokens[_INDEX(i + 1)], s1, head = _pop(s1, _context(contexts, i + 1), slots, bits, words, head)
        tokens[_INDEX(i + 2)], s2, head = _pop(s2, _context(contexts, i + 2), slots, bits, words, head)
        tokens[_INDEX(i + 3)], s3, head = _pop(s3, _context(contexts, i + 3), slots, bits, words, head)
    for i in range(whole, n):
        if head > limit:
            return -1
        tokens[_INDEX(i)], s0, head = _pop(s0, _context(contexts, i), slots, bits, words, head)
        s0, s1 = s1, s2  # the next lane's turn
    return head
