"""Frames: the changes of a few tensors, coded against their parent. What a delta version's files are made of.

A frame codes tensors of one layout as one long row of words, cut into segments. Per segment and bucket it says how many
changes there are and their class; the classes' tokens are entropy coded over the whole frame. Words that cannot be had
smaller are stored as they are.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from infra.codec import rans, scan, tokens
from infra.codec.layout import Layout, frozen
from infra.errors import Corrupted
from infra.store import Buffer

SEGMENT = 1 << 21
"""Words of a segment."""
_ALONE = 1 << 17
"""Words from which a tensor shares no segment: it has statistics of its own, and need not be copied into a row."""
_CODED, _STORED = 3, 2
_HEADER = "<BIIIII"  # kind of frame; bytes of head and raw bits; segments, table entries, streams


@dataclass
class Changes:
    """What is new in one tensor."""

    positions: np.ndarray
    """int64 [changes], ascending: places in the flat tensor, in words."""
    values: np.ndarray
    """The new words there."""


@dataclass
class _Segment:
    """Where a row of words comes from: slices (tensor, begin, end)."""

    parts: list[tuple[int, int, int]]

    def row(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        rows = [tensors[index][begin:end] for index, begin, end in self.parts]
        return frozen(rows[0] if len(rows) == 1 else np.concatenate(rows))


def _segments(sizes: Sequence[int]) -> Iterator[_Segment]:
    """Small tensors share a segment, big ones are cut."""
    parts: list[tuple[int, int, int]] = []
    room = SEGMENT
    for index, size in enumerate(sizes):
        begin = 0
        if size >= _ALONE:
            if parts:
                yield _Segment(parts)
                parts, room = [], SEGMENT
            yield from (_Segment([(index, at, min(size, at + SEGMENT))]) for at in range(0, size, SEGMENT))
            continue
        while begin < size:
            end = min(size, begin + room)
            parts.append((index, begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield _Segment(parts)
                parts, room = [], SEGMENT
    if parts:
        yield _Segment(parts)


def encode(old: Sequence[np.ndarray], new: Sequence[np.ndarray], layout: Layout) -> bytes:
    """The frame that makes `new` of `old`: words of one layout, flat, equal sizes pairwise.

    Holds beside them, at most: the coded frame, and about 25 bytes for each word of one segment.
    """
    coder = _Encoder(layout)
    for segment in _segments([len(words) for words in old]):
        coder.add(segment.row(old), segment.row(new))
    coded = coder.finish()
    size = sum(words.nbytes for words in new)
    return coded if len(coded) < size else store(new)


def store(new: Sequence[np.ndarray]) -> bytes:
    """The frame that holds `new` as it is."""
    return b"".join([bytes([_STORED]), *(words.tobytes() for words in new)])


def decode(frame: Buffer, old: Sequence[np.ndarray], layout: Layout) -> list[Changes]:
    """What changes in each tensor. Raises Corrupted when the frame does not fit `old`."""
    view = memoryview(frame)
    if not len(view):
        raise Corrupted("a frame of weight changes is empty")
    if view[0] == _STORED:
        return _decode_stored(view[1:], old, layout)
    if view[0] != _CODED:
        raise Corrupted(f"a frame of weight changes is of kind {view[0]}, which this code does not read")
    try:
        return _Decoder(view, layout).run(old)
    except (struct.error, ValueError, IndexError, zstandard.ZstdError) as error:
        raise Corrupted(f"a frame of weight changes does not fit its parent: {error}") from error


def warm_up(layout: Layout) -> None:
    """Compile the codec for a layout, or load what was compiled on this machine before; seconds, the first time."""
    old = [np.arange(64, dtype=layout.dtype)]
    decode(encode(old, [old[0] + old[0] % 3 // 2], layout), old, layout)


def _decode_stored(view: memoryview, old: Sequence[np.ndarray], layout: Layout) -> list[Changes]:
    if len(view) != sum(words.nbytes for words in old):
        raise Corrupted("a stored frame of weights does not have its parent's size")
    changes, at = [], 0
    for words in old:
        new = np.frombuffer(view[at : at + words.nbytes], layout.dtype)
        positions = np.flatnonzero(new != words)
        changes.append(Changes(positions, new[positions]))
        at += words.nbytes
    return changes


class _Encoder:
    def __init__(self, layout: Layout):
        self.layout = layout
        self.table: list[tuple[int, int, int]] = []  # bucket, class, changes
        self.rows: list[int] = []  # buckets with changes, per segment
        self.heads: list[int] = []  # bytes of raw bits, per segment
        self.bits: list[bytes] = []
        self.streams: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)  # (class, 0 gaps or 1 steps)

    def add(self, old: np.ndarray, new: np.ndarray) -> None:
        layout, n = self.layout, len(old)
        buckets, gaps, steps = np.empty(n, np.uint8), np.empty(n, np.int32), np.empty(n, np.int64)
        sizes, starts = np.empty(256, np.int64), np.empty(257, np.int64)
        full = (1 << 8 * layout.word) - 1
        count = scan.find_events(old, new, layout.sign, layout.shift, layout.mask, full, buckets, gaps, steps, sizes)
        classes = np.zeros(256, np.uint8)
        sorted_gaps, sorted_steps = np.empty(count, np.int64), np.empty(count, np.int64)
        tokens.sort_events(buckets, gaps, steps, count, sizes, starts, classes, sorted_gaps, sorted_steps)
        bits, head = np.zeros(8 * count + 16, np.uint8), 0
        used = np.flatnonzero(np.diff(starts))
        for bucket in used.tolist():
            begin, end, kind = int(starts[bucket]), int(starts[bucket + 1]), int(classes[bucket])
            dense = kind >= tokens.DENSE
            gap_tokens = np.empty(0 if dense else end - begin, np.uint8)
            step_tokens = np.empty(int(sorted_gaps[begin:end].sum()) if dense else end - begin, np.uint8)
            *_, head = tokens.put_events(
                sorted_gaps[begin:end], sorted_steps[begin:end], dense, gap_tokens, step_tokens, bits, head
            )
            self.table.append((bucket, kind, end - begin))
            self.streams[kind, 0].append(gap_tokens)
            self.streams[kind, 1].append(step_tokens)
        self.rows.append(len(used))
        self.heads.append(-(-head // 8))
        self.bits.append(bits[: self.heads[-1]].tobytes())

    def finish(self) -> bytes:
        table = np.array(self.table, np.uint32).reshape(-1, 3)
        streams = {key: np.concatenate(parts) for key, parts in sorted(self.streams.items())}
        streams = {key: stream for key, stream in streams.items() if len(stream)}
        shares = [rans.table(stream) for stream in streams.values()]
        coded = [rans.encode(stream, table) for stream, table in zip(streams.values(), shares, strict=True)]
        head = [
            np.array(self.rows, np.uint16),
            np.array(self.heads, np.uint32),
            table[:, 0].astype(np.uint8),
            table[:, 1].astype(np.uint8),
            # Low bytes first, and so below: high ones are mostly 0.
            _planes(table[:, 2]),
            np.array(list(streams), np.uint8),
            _planes(np.array([[len(s), len(c)] for s, c in zip(streams.values(), coded, strict=True)], np.uint32)),
            _planes(np.array(shares, np.uint16)),
        ]
        packed = zstandard.ZstdCompressor(level=9).compress(b"".join(part.tobytes() for part in head))
        sizes = (len(packed), sum(self.heads), len(self.rows), len(table), len(streams))
        return b"".join([struct.pack(_HEADER, _CODED, *sizes), packed, *self.bits, *coded])


def _planes(values: np.ndarray) -> np.ndarray:
    """The values' bytes, all lowest ones first."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return np.ascontiguousarray(flat.view(np.uint8).reshape(-1, flat.itemsize).T)


class _Decoder:
    def __init__(self, view: memoryview, layout: Layout):
        self.layout = layout
        _, packed, raw, segments, entries, streams = struct.unpack_from(_HEADER, view)
        at = struct.calcsize(_HEADER)
        self.head, self.at = zstandard.ZstdDecompressor().decompress(view[at : at + packed]), 0
        at += packed
        self.bits = np.frombuffer(view[at : at + raw], np.uint8)
        at += raw
        self.rows = self._take(np.uint16, segments).tolist()
        self.heads = self._take(np.uint32, segments).tolist()
        self.buckets = self._take(np.uint8, entries).tolist()
        self.classes = self._take(np.uint8, entries).tolist()
        self.counts = self._take_planes(np.uint32, entries).tolist()
        keys = self._take(np.uint8, 2 * streams).reshape(-1, 2).tolist()
        sizes = self._take_planes(np.uint32, 2 * streams).reshape(-1, 2).tolist()
        shares = self._take_planes(np.uint16, 256 * streams).reshape(-1, 256)
        self.streams = defaultdict(lambda: frozen(np.empty(0, np.uint8)))
        for (kind, stream), (count, size), table in zip(keys, sizes, shares, strict=True):
            self.streams[kind, stream] = frozen(rans.decode(view[at : at + size], table, count))
            at += size

    def _take(self, dtype: type, count: int) -> np.ndarray:
        taken = np.frombuffer(self.head, dtype, count, self.at)
        self.at += taken.nbytes
        return taken

    def _take_planes(self, dtype: type, count: int) -> np.ndarray:
        width = np.dtype(dtype).itemsize
        planes = self._take(np.uint8, width * count).reshape(width, count)
        return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)

    def run(self, old: Sequence[np.ndarray]) -> list[Changes]:
        found: list[list[Changes]] = [[] for _ in old]
        segments = list(_segments([len(words) for words in old]))
        if len(segments) != len(self.rows):
            raise ValueError(f"{len(self.rows)} segments, expected {len(segments)}")
        entry, byte = 0, 0
        at: dict[tuple[int, int], int] = defaultdict(int)
        for segment, rows, size in zip(segments, self.rows, self.heads, strict=True):
            bits = np.concatenate([self.bits[byte : byte + size], np.zeros(16, np.uint8)])
            positions, values = self._segment(segment.row(old), range(entry, entry + rows), bits, at)
            _distribute(segment, positions, values, found)
            entry, byte = entry + rows, byte + size
        return [_join(parts, self.layout) for parts in found]

    def _segment(
        self, old: np.ndarray, entries: range, bits: np.ndarray, at: dict[tuple[int, int], int]
    ) -> tuple[np.ndarray, np.ndarray]:
        starts = np.zeros(257, np.int64)
        for entry in entries:
            starts[self.buckets[entry] + 1] = self.counts[entry]
        starts = np.cumsum(starts)
        gaps, steps = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
        head = 0
        for entry in entries:
            kind, bucket = self.classes[entry], self.buckets[entry]
            begin, end = starts[bucket], starts[bucket + 1]
            used_gaps, used_steps, head = tokens.get_events(
                kind >= tokens.DENSE,
                self.streams[kind, 0][at[kind, 0] :],
                self.streams[kind, 1][at[kind, 1] :],
                bits,
                head,
                gaps[begin:end],
                steps[begin:end],
            )
            if used_steps < 0:
                raise ValueError("a stream of tokens ends too early")
            at[kind, 0] += used_gaps
            at[kind, 1] += used_steps
        layout = self.layout
        positions, values = np.empty(len(gaps), np.int64), np.empty(len(gaps), layout.dtype)
        full = (1 << 8 * layout.word) - 1
        placed = scan.place_events(
            old, layout.sign, layout.shift, layout.mask, full, starts, gaps, steps, positions, values
        )
        if placed != len(gaps):
            raise ValueError("changes lie beyond the tensors")
        return positions, values


def _distribute(segment: _Segment, positions: np.ndarray, values: np.ndarray, found: list[list[Changes]]) -> None:
    """A segment's changes to the tensors that it is made of."""
    offset = 0
    for index, begin, end in segment.parts:
        low, high = np.searchsorted(positions, [offset, offset + end - begin])
        if high > low:
            found[index].append(Changes(positions[low:high] + (begin - offset), values[low:high]))
        offset += end - begin


def _join(parts: list[Changes], layout: Layout) -> Changes:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Changes(np.empty(0, np.int64), np.empty(0, layout.dtype))
    return Changes(np.concatenate([p.positions for p in parts]), np.concatenate([p.values for p in parts]))
