"""Entropy coding of tokens: interleaved rANS (Duda, arXiv:1311.2540) over one static table a stream.

The tables are skewed (a step is mostly +-1, an element mostly unchanged), where a Huffman coder wastes a tenth, and the
streams long, where constriction's coders take 30 to 90 ns a token; this takes a few. Four states, so that a processor
works on four tokens at once; 32-bit states, 16-bit words, probabilities in 4096ths.
"""

import numpy as np
from numba import njit

from infra.codec.layout import frozen

_BITS = 12
_LANES = 4


def table(tokens: np.ndarray) -> np.ndarray:
    """uint16 [256]: each token's share in 4096ths, at least 1 for what occurs; the sum is 4096. tokens: uint8 [n > 0]."""
    counts = np.bincount(tokens, minlength=256)
    shares = np.where(counts > 0, np.maximum(1, np.round(counts * ((1 << _BITS) / len(tokens)))), 0).astype(np.int64)
    while (excess := shares.sum() - (1 << _BITS)) != 0:  # taken where it costs least: from the largest
        largest = shares.argmax()
        shares[largest] -= min(excess, shares[largest] // 2) if excess > 0 else excess
    return shares.astype(np.uint16)


def encode(tokens: np.ndarray, shares: np.ndarray) -> bytes:
    """The stream of tokens [n > 0] under `table(tokens)`."""
    words = np.empty(len(tokens) + 2 * _LANES, np.uint16)
    return words[_encode(frozen(tokens), shares.astype(np.int64), words) :].tobytes()


def decode(stream: memoryview, shares: np.ndarray, count: int) -> np.ndarray:
    """uint8 [count]. ValueError when the stream ends too early or the table is none."""
    if shares.sum() != 1 << _BITS or len(stream) < 4 * _LANES or len(stream) % 2:
        raise ValueError("a stream of tokens is damaged")
    tokens = np.empty(count, np.uint8)
    words = np.frombuffer(bytes(stream), np.uint16)  # aligned
    symbols = np.repeat(np.arange(256, dtype=np.uint8), shares)
    if _decode(words, shares.astype(np.int64), symbols, tokens) != len(words):
        raise ValueError("a stream of tokens has another length than its tokens")
    return tokens


@njit(cache=True, nogil=True)
def _encode(tokens, shares, words):
    """Fills `words` from its end; returns where the stream begins."""
    begins = np.zeros(257, np.int64)
    inverse = np.zeros(256, np.float64)
    for token in range(256):
        begins[token + 1] = begins[token] + shares[token]
        if shares[token]:
            inverse[token] = 1.0 / shares[token]
    states = np.full(_LANES, 1 << 16, np.int64)
    head = len(words)
    for i in range(len(tokens) - 1, -1, -1):
        token = tokens[i]
        share = shares[token]
        state = states[i % _LANES]
        if state >= share << 20:
            head -= 1
            words[head] = state & 0xFFFF
            state >>= 16
        quotient = np.int64(state * inverse[token])  # off by one at most
        rest = state - quotient * share
        if rest < 0:
            quotient -= 1
            rest += share
        elif rest >= share:
            quotient += 1
            rest -= share
        states[i % _LANES] = (quotient << _BITS) + rest + begins[token]
    for lane in range(_LANES - 1, -1, -1):
        head -= 2
        words[head] = states[lane] & 0xFFFF
        words[head + 1] = states[lane] >> 16
    return head


@njit(cache=True, nogil=True)
def _decode(words, shares, symbols, tokens):
    """Fills `tokens`; returns the words used, -1 if there are too few."""
    begins = np.zeros(257, np.int64)
    for token in range(256):
        begins[token + 1] = begins[token] + shares[token]
    states = np.empty(_LANES, np.int64)
    for lane in range(_LANES):
        states[lane] = np.int64(words[2 * lane]) | np.int64(words[2 * lane + 1]) << 16
    head = 2 * _LANES
    for i in range(len(tokens)):
        state = states[i % _LANES]
        slot = state & ((1 << _BITS) - 1)
        token = symbols[slot]
        tokens[i] = token
        state = shares[token] * (state >> _BITS) + slot - begins[token]
        if state < 1 << 16:
            if head == len(words):
                return -1
            state = state << 16 | np.int64(words[head])
            head += 1
        states[i % _LANES] = state
    return head
