"""Frames: the changes of a few tensors, coded against their parent. What a delta version's files are made of.

A frame codes tensors of one layout as one long row of words, cut into segments. Of a segment of which little changed it
says, by bucket, how many changes there are and their class; the classes' tokens are entropy coded over the whole frame.
One of which much changed is coded by itself (infra/policy/codec/dense.py). Words that cannot be had smaller are stored as they
are.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from infra.errors import Corrupted
from infra.policy.codec import dense, rans, scan, tokens
from infra.policy.codec.layout import Layout, frozen
from infra.policy.codec.packing import pack, scratch, unpack
from infra.storage.backend import Buffer

SEGMENT, SHARED = 1 << 21, 1 << 20
"""Words of a segment, of one tensor and of several: these are copied together."""
_ALONE = 1 << 17
"""Words from which a tensor shares no segment: it has statistics of its own, and need not be copied into a row."""
FORMAT, _STORED = 6, 2
"""Kinds of frame: coded, by this version of the code; stored."""
_EVENTS, _TOKENS, _RAW = range(3)
"""What a segment has: changes by bucket and raw bits of theirs; a token for each word; its words as they are."""
_STRIDE, _SAMPLED = 1 << 15, 256
"""Of every so many words, so many are looked at to see how a segment changed."""
_MUCH = 0.13
"""Share of changed words from which a segment has a token for each."""
_NARROW = 1 << 31
"""Words of a tensor up to which positions are int32."""
_HEADER = "<BIQIII"  # kind of frame; bytes of head and segments; segments, table entries, streams


@dataclass
class Changes:
    """What is new in one tensor."""

    positions: np.ndarray
    """int32 [changes], int64 where that is too narrow, ascending: places in the flat tensor, in words."""
    values: np.ndarray
    """The new words there."""


@dataclass
class _Segment:
    """Where a row of words comes from: slices (tensor, begin, end)."""

    parts: list[tuple[int, int, int]]

    @property
    def size(self) -> int:
        return sum(end - begin for _, begin, end in self.parts)

    def sample(self) -> "_Segment":
        """The first words of every tensor, and of every _STRIDE words of it."""
        starts = ((i, at, end) for i, begin, end in self.parts for at in range(begin, end, _STRIDE))
        return _Segment([(i, at, min(end, at + _SAMPLED)) for i, at, end in starts])

    def row(self, tensors: Sequence[np.ndarray], which: str) -> np.ndarray:
        """Of several tensors it is good until the next row of the same name in this thread."""
        rows = [tensors[index][begin:end] for index, begin, end in self.parts]
        if len(rows) == 1:
            return frozen(rows[0])
        return frozen(np.concatenate(rows, out=scratch(which, rows[0].dtype, self.size)))


def _cut(slices: Iterable[tuple[int, int, int]], size: int) -> Iterator[_Segment]:
    """The slices, in order, as segments of `size` words; the last one has what is left."""
    parts: list[tuple[int, int, int]] = []
    room = size
    for index, begin, end in slices:
        while begin < end:
            until = min(end, begin + room)
            parts.append((index, begin, until))
            room -= until - begin
            begin = until
            if room == 0:
                yield _Segment(parts)
                parts, room = [], size
    if parts:
        yield _Segment(parts)


def _segments(sizes: Sequence[int]) -> Iterator[_Segment]:
    """Small tensors share a segment, big ones are cut."""
    for alone, tensors in groupby(range(len(sizes)), key=lambda index: sizes[index] >= _ALONE):
        slices = [(index, 0, sizes[index]) for index in tensors]
        if alone:
            for one in slices:
                yield from _cut([one], SEGMENT)
        else:
            yield from _cut(slices, SHARED)


def encode(old: Sequence[np.ndarray], new: Sequence[np.ndarray], layout: Layout) -> bytes:
    """The frame that makes `new` of `old`: words of one layout, flat, equal sizes pairwise.

    Holds beside them, at most: the coded frame, the tokens of what changed, and, for each changed word of one segment, 20
    bytes.
    """
    coder = _Encoder(layout)
    for segment in _segments([len(words) for words in old]):
        coder.add(segment, old, new)
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
    if view[0] != FORMAT:
        raise Corrupted(f"a frame of weight changes is of kind {view[0]}, which this code does not read")
    try:
        return _Decoder(view, layout, sum(len(words) for words in old)).run(old)
    except (struct.error, ValueError, IndexError) as error:
        raise Corrupted(f"a frame of weight changes does not fit its parent: {error}") from error


def warm_up(layout: Layout) -> None:
    """Compile the codec for a layout, or load what was compiled on this machine before; seconds, the first time."""
    old = np.arange(4096).astype(layout.dtype)
    for every in (2, 16):  # much changed, and little
        new = old + (np.arange(len(old)) % every == 0).astype(layout.dtype)
        decode(encode([old], [new], layout), [old], layout)


def _decode_stored(view: memoryview, old: Sequence[np.ndarray], layout: Layout) -> list[Changes]:
    if len(view) != sum(words.nbytes for words in old):
        raise Corrupted("a stored frame of weights does not have its parent's size")
    changes, at = [], 0
    for words in old:
        new = np.frombuffer(view[at : at + words.nbytes], layout.dtype)
        positions = np.flatnonzero(new != words)
        narrow = positions.astype(np.int32) if len(words) <= _NARROW else positions
        changes.append(Changes(narrow, new[positions]))
        at += words.nbytes
    return changes


class _Encoder:
    def __init__(self, layout: Layout):
        self.layout = layout
        self.table: list[tuple[int, int, int]] = []  # bucket, class, changes
        self.kinds: list[int] = []  # per segment
        self.rows: list[int] = []  # buckets with changes, per segment
        self.bodies: list[bytes] = []  # per segment
        self.streams: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)  # (class, 0 gaps or 1 steps)

    def add(self, segment: _Segment, old: Sequence[np.ndarray], new: Sequence[np.ndarray]) -> None:
        some = segment.sample()
        seen, share = dense.sample(some.row(old, "old"), some.row(new, "new"), self.layout)
        kind, rows = _EVENTS, 0
        if share > _MUCH:
            pieces = ((p.row(old, "old"), p.row(new, "new")) for p in _cut(segment.parts, dense.PIECE))
            kind, body = _TOKENS, dense.encode(pieces, segment.size, self.layout, seen)
            if len(body) > segment.size * self.layout.word:
                kind, body = _RAW, segment.row(new, "new").tobytes()
        else:
            rows, body = self._add_events(segment.row(old, "old"), segment.row(new, "new"))
        self.kinds.append(kind)
        self.rows.append(rows)
        self.bodies.append(body)

    def _add_events(self, old: np.ndarray, new: np.ndarray) -> tuple[int, bytes]:
        """Buckets with changes, and raw bits."""
        layout, changed = self.layout, int(np.count_nonzero(old != new))
        room = changed + 1
        buckets, gaps, steps = np.empty(room, np.uint8), np.empty(room, np.uint32), np.empty(room, np.uint32)
        sorted_gaps, sorted_steps = np.empty(changed, np.uint32), np.empty(changed, np.uint32)
        sizes, starts, classes = np.empty(256, np.int64), np.empty(257, np.int64), np.zeros(256, np.uint8)
        scan.find_events(old, new, layout.sign_word, layout.shift, layout.mask, buckets, gaps, steps, sizes)
        tokens.sort_events(buckets, gaps, steps, changed, sizes, starts, classes, sorted_gaps, sorted_steps)
        bits, place = np.empty(2 * changed + 1, np.uint32), (0, 0, 0)
        used = np.flatnonzero(np.diff(starts)).tolist()
        for bucket in used:
            begin, end, kind = int(starts[bucket]), int(starts[bucket + 1]), int(classes[bucket])
            by_element = kind >= tokens.DENSE
            events = sorted_gaps[begin:end], sorted_steps[begin:end]
            gap_tokens = np.empty(0 if by_element else end - begin, np.uint8)
            step_tokens = np.empty(int(events[0].sum()) if by_element else end - begin, np.uint8)
            place = tokens.put_events(*events, by_element, gap_tokens, step_tokens, bits, *place)
            self.table.append((bucket, kind, end - begin))
            self.streams[kind, 0].append(gap_tokens)
            self.streams[kind, 1].append(step_tokens)
        head, held, count = place
        bits[head] = held
        return len(used), bits[: head + (count > 0)].tobytes()

    def finish(self) -> bytes:
        table = np.array(self.table, np.uint32).reshape(-1, 3)
        streams = {key: np.concatenate(parts) for key, parts in sorted(self.streams.items())}
        streams = {key: stream for key, stream in streams.items() if len(stream)}
        shares = [rans.table(tokens.counts(stream)) for stream in streams.values()]
        coded = [rans.encode(stream, table[None]) for stream, table in zip(streams.values(), shares, strict=True)]
        bodies = [len(body) for body in self.bodies]
        head = [
            np.array(self.kinds, np.uint8),
            np.array(self.rows, np.uint16),
            np.array(bodies, np.uint32),
            table[:, 0].astype(np.uint8),
            table[:, 1].astype(np.uint8),
            # Low bytes first, and so below: high ones are mostly 0.
            _planes(table[:, 2]),
            np.array(list(streams), np.uint8),
            _planes(np.array([[len(s), len(c)] for s, c in zip(streams.values(), coded, strict=True)], np.uint32)),
            _planes(np.array(shares, np.uint16)),
        ]
        packed = pack(b"".join(part.tobytes() for part in head), level=9)
        sizes = (len(packed), sum(bodies), len(self.rows), len(table), len(streams))
        return b"".join([struct.pack(_HEADER, FORMAT, *sizes), packed, *self.bodies, *coded])


def _planes(values: np.ndarray) -> np.ndarray:
    """The values' bytes, all lowest ones first."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return np.ascontiguousarray(flat.view(np.uint8).reshape(-1, flat.itemsize).T)


class _Decoder:
    def __init__(self, view: memoryview, layout: Layout, words: int):
        self.layout = layout
        _, packed, bodies, segments, entries, streams = struct.unpack_from(_HEADER, view)
        at = struct.calcsize(_HEADER)
        self.head, self.at = unpack(view[at : at + packed]), 0
        at += packed
        self.bodies = view[at : at + bodies]
        at += bodies
        self.kinds = self._take(np.uint8, segments).tolist()
        self.rows = self._take(np.uint16, segments).tolist()
        self.sizes = self._take(np.uint32, segments).tolist()
        self.buckets = self._take(np.uint8, entries).tolist()
        self.classes = self._take(np.uint8, entries).tolist()
        self.counts = self._take_planes(np.uint32, entries).tolist()
        keys = self._take(np.uint8, 2 * streams).reshape(-1, 2).tolist()
        sizes = self._take_planes(np.uint32, 2 * streams).reshape(-1, 2).tolist()
        shares = self._take_planes(np.uint16, 256 * streams).reshape(-1, 256)
        if sum(count for count, _ in sizes) > 2 * words:  # tokens of one value take no room in a stream
            raise ValueError("there are more tokens than words")
        self.streams = defaultdict(lambda: frozen(np.empty(0, np.uint8)))
        for (kind, stream), (count, size), table in zip(keys, sizes, shares, strict=True):
            found = np.empty(count, np.uint8)
            rans.decode(view[at : at + size], table[None], found)
            self.streams[kind, stream] = frozen(found)
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
        if len(segments) != len(self.kinds):
            raise ValueError(f"{len(self.kinds)} segments, expected {len(segments)}")
        entry, byte = 0, 0
        at: dict[tuple[int, int], int] = defaultdict(int)
        for segment, kind, rows, size in zip(segments, self.kinds, self.rows, self.sizes, strict=True):
            row, body = segment.row(old, "old"), self.bodies[byte : byte + size]
            if kind == _EVENTS:
                changes = self._events(row, range(entry, entry + rows), body, at)
            else:
                changes = Changes(*dense.decode(body, row, self.layout)) if kind == _TOKENS else _raw(row, body)
            _distribute(segment, changes, found)
            entry, byte = entry + rows, byte + size
        return [_join(parts, self.layout) for parts in found]

    def _events(self, old: np.ndarray, entries: range, body: memoryview, at: dict[tuple[int, int], int]) -> Changes:
        starts = np.zeros(257, np.int64)
        for entry in entries:
            starts[self.buckets[entry] + 1] = self.counts[entry]
        starts = np.cumsum(starts)
        if starts[-1] > len(old):
            raise ValueError("there are more changes than words")
        gaps, steps = np.empty(starts[-1], np.uint32), np.empty(starts[-1], np.uint32)
        bits, place = np.frombuffer(bytes(body), np.uint32), (0, 0, 0)
        for entry in entries:
            kind, bucket = self.classes[entry], self.buckets[entry]
            begin, end = starts[bucket], starts[bucket + 1]
            used_gaps, used_steps, *place = tokens.get_events(
                kind >= tokens.DENSE,
                self.streams[kind, 0][at[kind, 0] :],
                self.streams[kind, 1][at[kind, 1] :],
                bits,
                *place,
                gaps[begin:end],
                steps[begin:end],
            )
            if used_steps < 0:
                raise ValueError("a stream of tokens ends too early")
            at[kind, 0] += used_gaps
            at[kind, 1] += used_steps
        layout = self.layout
        changes = Changes(np.empty(len(gaps), np.int32), np.empty(len(gaps), layout.dtype))
        placed = scan.place_events(
            old,
            layout.sign_word,
            layout.shift,
            layout.mask,
            starts,
            gaps,
            steps,
            changes.positions,
            changes.values,
        )
        if placed != len(gaps):
            raise ValueError("changes lie beyond the tensors")
        return changes


def _raw(old: np.ndarray, body: memoryview) -> Changes:
    new = np.frombuffer(body, old.dtype)
    if len(new) != len(old):
        raise ValueError("stored words do not have their parent's size")
    positions = np.flatnonzero(new != old)
    return Changes(positions.astype(np.int32), new[positions])


def _distribute(segment: _Segment, changes: Changes, found: list[list[Changes]]) -> None:
    """A segment's changes to the tensors that it is made of."""
    ends = list(accumulate((end - begin for _, begin, end in segment.parts), initial=0))
    places = np.searchsorted(changes.positions, np.array(ends, np.int32)).tolist()
    for (index, begin, end), offset, low, high in zip(segment.parts, ends, places, places[1:], strict=False):
        if high > low:
            positions = changes.positions[low:high]
            if end > _NARROW:
                positions = positions.astype(np.int64)
            if begin != offset:
                positions += begin - offset
            found[index].append(Changes(positions, changes.values[low:high]))


def _join(parts: list[Changes], layout: Layout) -> Changes:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Changes(np.empty(0, np.int32), np.empty(0, layout.dtype))
    return Changes(np.concatenate([p.positions for p in parts]), np.concatenate([p.values for p in parts]))
