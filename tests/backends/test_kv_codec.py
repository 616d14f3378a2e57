"""The codec of stored KV: its streams and numbers are those of the oracle, and no stream makes it leave its buffers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cloister.backends.kv_codec import NARROW_CONTEXTS, SCALE_BITS, make_frequencies
from cloister.backends.kv_planes import KVPlane, plane_array
from cloister.backends.native import _native
from cloister.backends.native.kv_codec import BlockCodec
from cloister.backends.native.kv_planes import list_head_planes
from tests.backends import kv_codec_oracle as oracle
from tests.driving import RandomWeights, build, make_spec

ByteArray = npt.NDArray[np.uint8]

ROWS = (KVPlane(0, 2, 9, 1, 40, 1, 40, 0, 1, 0),)  # a width that is no multiple of the coders
LAYOUTS: dict[str, tuple[KVPlane, ...]] = {
    "bfloat16, as the kernels": tuple(list_head_planes(32, 6, 2, has_values=True, offset=0)),
    "bfloat16, odd": tuple(list_head_planes(32, 5, 2, has_values=True, offset=0)),
    "float32, as the kernels": tuple(list_head_planes(32, 4, 4, has_values=True, offset=0)),
    "one plane of rows": ROWS,
    "one position": (KVPlane(0, 4, 1, 1, 8, 1, 8, 0, 1, 0),),
}


def size_of(planes: tuple[KVPlane, ...]) -> int:
    return sum(plane.num_bytes for plane in planes)


def draw(planes: tuple[KVPlane, ...], seed: int = 0) -> bytes:
    """Numbers as keys have them: each channel about a mean of its own, a few far off. The first position has small ones."""
    rng, content = np.random.default_rng(seed), bytearray(size_of(planes))
    for plane in planes:
        shape = plane.num_tokens, plane.num_channels
        numbers = rng.standard_normal(plane.num_channels) * 5 + rng.standard_t(3, shape) * rng.uniform(
            0.1, 4, plane.num_channels
        )
        numbers[0] /= 40
        bits = numbers.astype(np.float32).view(np.uint32) >> (16 if plane.number_bytes == 2 else 0)
        kind = "<u2" if plane.number_bytes == 2 else "<u4"
        span = (int(plane.places().max()) + 1) * plane.number_bytes
        np.frombuffer(content, np.uint8, span, plane.offset).view(kind)[plane.places()] = bits
    return bytes(content)


def encode(planes: tuple[KVPlane, ...], content: bytes, step: float) -> bytes:
    room = np.empty(4 * len(content) + 1000, np.uint8)
    length = BlockCodec(planes, len(content)).encode(content, step, room)
    assert length
    return room[:length].tobytes()


def decode(planes: tuple[KVPlane, ...], stream: bytes, *, is_plain: bool = False) -> bytes | None:
    """Returns the block of a stream, None if it is none; checks that nothing beside the block was written."""
    size, around = size_of(planes), 64
    memory = np.full(size + 2 * around, 0xA5, np.uint8)
    codec = _native.KVCodec(make_frequencies(), plane_array(planes), size)
    is_whole = codec.decode(np.frombuffer(stream, np.uint8), memory[around : around + size], is_plain)
    assert (memory[:around] == 0xA5).all()
    assert (memory[around + size :] == 0xA5).all()
    return memory[around : around + size].tobytes() if is_whole else None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [0.0, 0.25, 0.01])
def test_streams_and_numbers_are_those_of_the_oracle(layout: str, step: float) -> None:
    planes = LAYOUTS[layout]
    content = draw(planes)
    stream = encode(planes, content, step)
    assert stream == oracle.encode(planes, content, [step] * len(planes))
    block = oracle.decode(planes, stream, len(content))
    assert decode(planes, stream) == decode(planes, stream, is_plain=True) == block
    assert (block == content) == (step == 0.0 or layout == "one position")  # one has no distance from its mean to round by


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_loss_any_bits_come_back(layout: str) -> None:
    planes = LAYOUTS[layout]
    for seed in range(5):
        content = random.Random(seed).randbytes(size_of(planes))  # infinities and what is no number too
        assert decode(planes, encode(planes, content, 0.0)) == content


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_cannot_be_rounded_comes_back_as_it_is(bad: float) -> None:
    planes = LAYOUTS["float32, as the kernels"]
    numbers = np.frombuffer(draw(planes), np.float32).copy()
    numbers[7] = bad
    others = numbers[planes[0].num_bytes // 4 :]
    block = decode(planes, encode(planes, numbers.tobytes(), 0.25))
    assert block is not None
    keys, values = np.split(np.frombuffer(block, np.float32), [planes[0].num_bytes // 4])
    assert keys.tobytes() == numbers[: keys.size].tobytes()
    assert values.tobytes() != others.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros_take_next_to_nothing(layout: str) -> None:
    planes = LAYOUTS[layout]
    content = bytes(size_of(planes))
    stream = encode(planes, content, 0.25)
    assert stream == oracle.encode(planes, content, [0.25] * len(planes))
    assert decode(planes, stream) == content
    assert len(stream) < 7 * len(planes) + 12 + 64 + len(content) // 20 + 2


@pytest.mark.parametrize("far", [262142.8, 262143.9, 262144.5])
def test_the_farthest_numbers_that_can_be_rounded_come_back(far: float) -> None:
    planes = (KVPlane(0, 4, 2, 1, 8, 1, 8, 0, 1, 0),)
    numbers = np.zeros((2, 8), np.float32)
    numbers[0], numbers[1] = -far, far  # a step of 1 / far of their distance from the mean
    step = 1 / far
    stream = encode(planes, numbers.tobytes(), step)
    assert stream == oracle.encode(planes, numbers.tobytes(), [step])
    block = decode(planes, stream)
    assert block is not None
    np.testing.assert_allclose(np.frombuffer(block, np.float32), numbers.reshape(-1), atol=0.51)


def test_numbers_are_off_by_half_a_step_at_most() -> None:
    planes = LAYOUTS["float32, as the kernels"]
    content = draw(planes)
    block = decode(planes, encode(planes, content, 0.5))
    assert block is not None
    for plane in planes:
        span = slice(plane.offset, plane.offset + plane.num_bytes)
        numbers, found = (np.frombuffer(each[span], np.float32)[plane.places()] for each in (content, block))
        step = 0.5 * float(np.sqrt(numbers.astype(np.float64).var(0).mean()))
        assert 0.4 * step < np.abs(found - numbers).max() <= 0.5001 * step


@pytest.mark.parametrize(("size", "halvings"), [(2.0, 0), (1.0, 0), (0.8, 0), (0.4, 1), (1 / 16, 4), (1 / 1000, 7), (0.0, 7)])
def test_a_position_with_small_numbers_is_rounded_by_finer_steps(size: float, halvings: int) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((32, 64)).astype(np.float32)
    numbers[5] *= size
    planes = (KVPlane(0, 4, 32, 1, 64, 1, 64, 0, 1, 0),)
    stream = encode(planes, numbers.tobytes(), 0.5)
    assert stream == oracle.encode(planes, numbers.tobytes(), [0.5])
    block = decode(planes, stream)
    assert block is not None
    off = np.abs(np.frombuffer(block, np.float32).reshape(32, 64) - numbers).max(1)
    step = 0.5 * float(np.sqrt(numbers.astype(np.float64).var(0).mean()))
    assert off.max() <= 0.5001 * step
    assert off[5] <= 0.5001 * step / 2**halvings
    assert size < 0.01 or off[5] > 0.4 * step / 2**halvings


def test_a_stream_is_smaller_and_the_more_so_with_loss() -> None:
    planes = tuple(list_head_planes(64, 16, 2, has_values=True, offset=0))
    content = draw(planes)
    sizes = [len(encode(planes, content, step)) for step in (0.0, 0.25, 0.5, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(content) / sizes[0] > 1.3
    assert len(content) / sizes[1] > 3.2


def test_a_stream_that_does_not_fit_is_not_written() -> None:
    content = draw(ROWS)
    room = np.full(len(content), 7, np.uint8)
    assert BlockCodec(ROWS, len(content)).encode(content, 0.0, room[:100]) == 0
    assert (room == 7).all()


@pytest.mark.parametrize("step", [0.0, 0.25])
@pytest.mark.parametrize("is_plain", [False, True])
def test_no_stream_makes_the_decoder_leave_its_buffers(step: float, is_plain: bool) -> None:
    content, rng = draw(ROWS), random.Random(0)
    stream = encode(ROWS, content, step)
    for length in range(0, len(stream), 7):
        assert decode(ROWS, stream[:length], is_plain=is_plain) is None
    for _ in range(200):
        damaged = bytearray(stream)
        for _ in range(rng.choice((1, 1, 8))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        decode(ROWS, bytes(damaged), is_plain=is_plain)
    for _ in range(200):
        decode(ROWS, stream[: rng.randrange(80)] + rng.randbytes(rng.randrange(len(stream))), is_plain=is_plain)
    assert decode(ROWS, stream + b"\0", is_plain=is_plain) is None
    assert decode(ROWS, stream, is_plain=is_plain) is not None


def test_a_damaged_word_is_noticed_without_any_other_check() -> None:
    content = draw(ROWS)
    stream = encode(ROWS, content, 0.25)
    words = range(7 + 12 + 64, len(stream) - 40, 5)
    damaged = [stream[:at] + bytes([stream[at] ^ 16]) + stream[at + 1 :] for at in words]
    noticed = [decode(ROWS, one) is None for one in damaged]
    assert sum(noticed) > 0.99 * len(noticed)


@pytest.mark.parametrize(
    "wrong",
    [
        (KVPlane(0, 2, 9, 1, 40, 1, 41, 0, 1, 0),),  # its last row is beyond the block
        (KVPlane(2, 2, 9, 1, 40, 1, 40, 0, 1, 0),),
        (KVPlane(0, 3, 9, 1, 40, 1, 40, 0, 1, 0),),
        (KVPlane(0, 2, 9, 2, 40, 1, 40, 0, 1, 0),),
        (KVPlane(0, 2, 8, 1, 40, 1, 40, 0, 1, 0),),  # not all of the block
        (KVPlane(-2, 2, 9, 1, 40, 1, 40, 0, 1, 0),),
    ],
)
def test_planes_that_are_not_the_block_are_refused(wrong: tuple[KVPlane, ...]) -> None:
    with pytest.raises(ValueError, match="plane"):
        BlockCodec(wrong, 720)


def test_models_are_whole_and_have_room_for_every_symbol() -> None:
    frequencies = make_frequencies()
    assert (frequencies.sum(1) == 1 << SCALE_BITS).all()
    assert frequencies.min() > 0
    narrow = frequencies[:NARROW_CONTEXTS]
    assert (narrow[:, :31] == narrow[:, 62:31:-1]).all()  # a difference is as likely as its opposite
    spreads = [float((np.abs(np.arange(63) - 31) * row[:63]).sum()) for row in narrow]
    assert spreads == sorted(spreads)
    with pytest.raises(ValueError, match="do not sum"):
        _native.KVCodec(np.full_like(frequencies, 63), plane_array(ROWS), 720)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_back_ends_find_the_same_keys_and_values_by_position_and_channel(dtype: str) -> None:
    spec = make_spec(hidden=64, intermediate=64, heads=(4, 2), head_dim=32)
    tokens = list(range(3, 19))
    found = {}
    for backend in ("torch", "native"):
        driver = build(spec, RandomWeights(spec), backend=backend, dtype=dtype, num_blocks=4, block_size=16)
        driver.run(0, tokens)
        (block,) = driver.blocks(0)
        (content,), planes = driver.program.export_blocks([block]), driver.program.list_planes(block)
        assert covered(planes) == set(range(len(content)))
        numbers = [oracle._read(plane, content) << (16 if dtype == "bfloat16" else 0) for plane in planes]
        wide = [each.astype(np.uint32).view(np.float32) for each in numbers]
        if backend == "native":  # a plane for each head: keys and values of the first one, then of the second
            wide = [np.concatenate(wide[first : first + 4 : 2], 1) for layer in (0, 4) for first in (layer, layer + 1)]
        found[backend] = wide
    for ours, theirs in zip(*found.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.1 if dtype == "bfloat16" else 1e-3)


def covered(planes: list[KVPlane]) -> set[int]:
    """The bytes that planes have, each once."""
    starts = [plane.offset + plane.number_bytes * plane.places().reshape(-1) for plane in planes]
    places = [
        start + k
        for plane, own in zip(planes, starts, strict=True)
        for start in own.tolist()
        for k in range(plane.number_bytes)
    ]
    assert len(places) == len(set(places))
    return set(places)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "kivi2"])
def test_kv_in_few_bits_has_no_planes(kv_dtype: str) -> None:
    spec = make_spec(hidden=64, intermediate=64, heads=(4, 2), head_dim=32)
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "dtype": "bfloat16", "block_size": 32, "num_blocks": 4}
    assert build(spec, RandomWeights(spec), backend="native", **options).program.list_planes(0) == []
