"""The codec of weight changes: lossless for every dtype and every pattern of bits, small where updates are, fast."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import Corrupted
from infra.policy.codec import frame, rans
from infra.policy.codec.layout import _LAYOUTS, layout_of, words
from infra.policy.codec.packing import pack, unpack

DTYPES = sorted(_LAYOUTS, key=str)


def bits(generator: np.random.Generator, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Any pattern of bits: NaNs, infinities, subnormals and both zeros among them."""
    raw = generator.integers(0, 2 if dtype == torch.bool else 256, size * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype) if size else torch.empty(0, dtype=dtype)


def coded(old: list[torch.Tensor], new: list[torch.Tensor]) -> bytes:
    """The frame of a change, after checking that it gives `new` back, bit for bit, and touches nothing else."""
    layout = layout_of(old[0].dtype)
    olds, news = [words(t) for t in old], [words(t) for t in new]
    data = frame.encode(olds, news, layout)
    for before, after, found in zip(olds, news, frame.decode(data, olds, layout), strict=True):
        assert np.array_equal(found.positions, np.flatnonzero(before != after))
        assert np.array_equal(found.values, after[found.positions])
    assert len(data) <= sum(w.nbytes for w in news) + 1
    return data


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    far=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_change_of_every_dtype_comes_back_bit_for_bit(
    dtype: torch.dtype, sizes: list[int], share: float, far: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    old = [bits(generator, dtype, size) for size in sizes]
    new = []
    for tensor in old:
        after = tensor.clone()
        changed = generator.random(len(words(after))) < share
        if far or dtype == torch.bool:
            words(after)[changed] = words(bits(generator, dtype, tensor.numel()))[changed]
        else:
            words(after)[changed] += 1
        new.append(after)
    coded(old, new)


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_places_that_32_bits_cannot_say_have_64(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """A tensor of 2**31 words would not fit here: the boundary is lowered."""
    monkeypatch.setattr(frame, "SEGMENT", 1 << 18)
    monkeypatch.setattr(frame, "_NARROW", 1 << 19)
    generator = np.random.default_rng(0)
    old = [generator.integers(0, 1 << 16, size, dtype=np.uint16) for size in (300, 3 << 18, 1 << 19, 40)]
    new = [words + (generator.random(len(words)) < share).astype(np.uint16) for words in old]
    layout = layout_of(torch.bfloat16)
    for data in (frame.encode(old, new, layout), frame.store(new)):
        found = frame.decode(data, old, layout)
        assert [changes.positions.dtype for changes in found] == [np.int32, np.int64, np.int32, np.int32]
        for changes, before, after in zip(found, old, new, strict=True):
            assert np.array_equal(changes.positions, np.flatnonzero(before != after))
            assert np.array_equal(changes.values, after[changes.positions])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_special_values_go_to_each_other(dtype: torch.dtype) -> None:
    if dtype.itemsize == 1:
        special = torch.arange(256).to(torch.uint8).view(dtype)
    else:
        tiny = torch.finfo(dtype).smallest_normal
        values = [
            0.0,
            -0.0,
            float("inf"),
            -float("inf"),
            float("nan"),
            -float("nan"),
            tiny,
            tiny / 2,
            -tiny / 4,
            1.0,
            -1.0,
        ]
        special = torch.tensor([*values, torch.finfo(dtype).max], dtype=dtype)
    for shift in range(len(special)):
        coded([special], [special.roll(shift)])


def test_the_step_from_negative_to_positive_zero_is_a_small_one() -> None:
    old = torch.zeros(100_000).bfloat16()
    new = old.clone()
    new[::100] = -0.0
    assert len(coded([old], [new])) < 700


def adamw(old: torch.Tensor, lr: float, seed: int) -> torch.Tensor:
    """One step as AdamW makes it, of fp32 weights that lie anywhere in their bf16 value's interval."""
    generator = torch.Generator().manual_seed(seed)
    ulp = 2.0 ** (torch.frexp(old.float())[1] - 8)
    master = old.float() + ulp * (torch.rand(old.shape, generator=generator) - 0.5)
    return (master + lr * torch.randn(old.shape, generator=generator)).bfloat16()


def test_an_adamw_step_is_near_its_entropy_and_far_below_xor_and_zstd() -> None:
    import zstandard

    old = torch.randn(2**21, generator=torch.Generator().manual_seed(0)).mul(0.04).bfloat16()
    new = adamw(old, 1e-6, 1)
    data = coded([old], [new])
    xor = len(zstandard.ZstdCompressor(level=1).compress((words(old) ^ words(new)).tobytes()))
    assert xor > 1.8 * len(data)


def test_what_is_random_costs_no_more_than_itself() -> None:
    generator = np.random.default_rng(0)
    old, new = bits(generator, torch.bfloat16, 100_000), bits(generator, torch.bfloat16, 100_000)
    assert len(coded([old], [new])) == 200_001


def test_tensors_bigger_than_a_segment_and_many_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("SEGMENT", 100), ("SHARED", 70), ("_ALONE", 90)):
        monkeypatch.setattr(frame, name, size)
    generator = torch.Generator().manual_seed(0)
    old = [torch.randn(size, generator=generator).bfloat16() for size in (250, 1, 0, 30, 30, 30, 400, 99, 100, 101)]
    coded(old, [adamw(tensor, 1e-2, 1) for tensor in old])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("size", [16_383, 16_384, 16_385, 40_001])
def test_much_changed_rows_of_one_block_and_of_several(dtype: torch.dtype, size: int) -> None:
    """Near and far steps, elements that stay, and a last block that is short or odd."""
    generator = np.random.default_rng(size)
    old, noise = bits(generator, dtype, size), bits(generator, dtype, size)
    new = old.clone()
    near = generator.random(size) < 0.5
    words(new)[near] += generator.integers(1, 30, near.sum()).astype(words(new).dtype)
    far = generator.random(size) < 0.05
    words(new)[far] = words(noise)[far]
    assert len(coded([old], [new])) < 0.9 * old.nbytes


def test_where_much_changes_it_is_far_below_xor_and_zstd() -> None:
    """Steps as far as AdamW's first ones, in small numbers many units in the last place."""
    import zstandard

    old = torch.randn(2**18, generator=torch.Generator().manual_seed(0)).mul(0.04).bfloat16()
    new = adamw(old, 1e-4, 1)
    assert 0.3 < (words(old) != words(new)).mean() < 0.7
    data = coded([old], [new])
    xor = len(zstandard.ZstdCompressor(level=1).compress((words(old) ^ words(new)).tobytes()))
    assert xor > 1.8 * len(data)


@pytest.mark.parametrize("lr", [1e-3, 1e-2, 1e-1])
def test_a_damaged_frame_or_another_parent_is_found_or_harmless(lr: float) -> None:
    """Digests are what proves content; a wrong frame must only never crash, hang, or write beyond the tensors."""
    old = torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    layout, olds = layout_of(torch.bfloat16), [words(old)]
    data = frame.encode(olds, [words(adamw(old, lr, 1))], layout)
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(data), 200):
        wrong = bytearray(data)
        wrong[place] ^= 1 << generator.integers(0, 8)
        try:
            found = frame.decode(wrong, olds, layout)[0]
        except Corrupted:
            continue
        assert (found.positions >= 0).all() and (found.positions < 3000).all()
    with pytest.raises(Corrupted):
        frame.decode(data[: len(data) // 2], olds, layout)
    with pytest.raises(Corrupted):
        frame.decode(data, [words(old)[:100]], layout)


def test_sizes_that_a_damaged_frame_says_cost_no_memory() -> None:
    """Tokens of one value take no room in a stream, and zstd believes any size."""
    old = torch.ones(3000).bfloat16()
    new = old.clone()
    words(new)[99::100] += 1
    data = frame.encode([words(old)], [words(new)], layout_of(torch.bfloat16))
    kind, packed, bodies, segments, entries, streams = struct.unpack_from(frame._HEADER, data)
    begin = struct.calcsize(frame._HEADER)
    head = bytearray(unpack(memoryview(data)[begin : begin + packed]))
    head[7 * segments + 6 * entries + 2 * streams + 3 * 2 * streams] = (
        0x80  # of the first stream's tokens the highest byte
    )
    many = pack(bytes(head), level=9)
    vast = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**62) + bytes(3)
    for wrong in (many, vast):
        sizes = struct.pack(frame._HEADER, kind, len(wrong), bodies, segments, entries, streams)
        with pytest.raises(Corrupted):
            frame.decode(sizes + wrong + data[begin + packed :], [words(old)], layout_of(torch.bfloat16))


@given(st.lists(st.integers(0, 255), min_size=1, max_size=600), st.integers(1, 255))
@settings(max_examples=60)
def test_tokens_of_any_distribution_come_back(values: list[int], alphabet: int) -> None:
    tokens = np.array(values, np.uint8) % alphabet
    contexts = np.arange(len(tokens), dtype=np.uint8) % 3
    tables = np.zeros((3, 256), np.uint16)
    for context in range(min(3, len(tokens))):
        tables[context] = rans.table(np.bincount(tokens[contexts == context], minlength=256))
    used = tables[: contexts.max() + 1]
    assert (used.sum(1) == 4096).all()
    stream = rans.encode(tokens | contexts.astype(np.uint16) << 8, used)
    found = np.empty_like(tokens)
    rans.decode(memoryview(stream), used, found, contexts)
    assert np.array_equal(found, tokens)


def test_the_entropy_coder_is_within_a_hundredth_of_the_entropy() -> None:
    shares = np.array([0.97, 0.01, 0.01, 0.005, 0.005])
    tokens = np.random.default_rng(0).choice(5, 200_000, p=shares).astype(np.uint8)
    entropy = -(shares * np.log2(shares)).sum() / 8 * len(tokens)
    table = rans.table(np.bincount(tokens, minlength=256))
    assert len(rans.encode(tokens, table[None])) < 1.01 * entropy
