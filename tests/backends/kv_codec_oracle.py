"""The codec of `backends.kv_codec` in Python: the same streams and numbers as the compiled one, a symbol at a time."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.kv_codec import NUM_CONTEXTS, NUM_SYMBOLS, SCALE_BITS, low_bits, make_frequencies
from cloister.backends.kv_planes import KVPlane

IntArray = npt.NDArray[np.int64]

NUM_LANES, LOWEST, ESCAPE_BITS, MIDDLE, ESCAPE = 16, 1 << 16, 20, NUM_SYMBOLS // 2 - 1, NUM_SYMBOLS - 1
EXACT, ROUNDED, MOST_HALVINGS = 1, 2, 7
_STARTS = [[0, *accumulate(row)] for row in make_frequencies().tolist()]


def _halves(sixteenths: Any) -> Any:
    """Returns the context of a size: twice its binary logarithm, as the bits of a float have it."""
    bits = np.asarray(sixteenths + 1, np.float32).view(np.uint32) >> 22
    return np.minimum(bits.astype(np.int64) - 254, NUM_CONTEXTS - 1)


class Channels:
    """What is known of the channels of a plane: what their next integers are about, and how far off that was."""

    def __init__(self, width: int, first: int, contexts: Sequence[int]) -> None:
        self.predicted = np.full(width, first)
        self.context = np.full(width, contexts[0])
        self._size = np.full(width, (3 if contexts[1] % 2 else 2) * 2 ** (contexts[1] // 2) // 2 - 1)
        self._mean = np.zeros(width, np.int64)
        self._time = 0

    def learn(self, integers: IntArray) -> None:
        now, off = integers * 16, abs(integers - self.predicted) * 16
        if self._time == 0:
            self._mean = now
        else:
            self._mean = self._mean + ((now - self._mean) >> (1 if self._time == 1 else 2 if self._time < 4 else 3))
            self._size = self._size + ((off - self._size) >> 2)
        self._time += 1
        self.predicted, self.context = (self._mean + 8) >> 4, _halves(self._size)


def encode(planes: Sequence[KVPlane], content: bytes, steps: Sequence[float]) -> bytes:
    """Returns the stream of a block."""
    headers, verbatim, low = b"", b"", list[tuple[int, int]]()
    symbols: list[tuple[int, int, int]] = []  # lane, context, symbol
    for plane, step in zip(planes, steps, strict=True):
        bits = _read(plane, content)
        integers, unit, halvings = _round(plane, bits, step)
        first = 0
        if unit is None:
            raw_bits = 8 * plane.number_bytes - 8
            integers = (bits >> (raw_bits - 1)) & 255
            first = int(sorted(integers[0].tolist())[plane.num_channels // 2])
            rest = (bits >> (raw_bits + 7)) << (raw_bits - 1) | (bits & ((1 << (raw_bits - 1)) - 1))
            verbatim += b"".join(int(one).to_bytes(raw_bits // 8, "little") for one in rest.reshape(-1))
        spread = abs(integers[1] - integers[0]).mean() if plane.num_tokens > 1 else 0.0
        contexts = [int(_halves(np.float32(min(size, 1e9)) * 16)) for size in (abs(integers[0] - first).mean(), spread)]
        end = bytes([first]) if unit is None else struct.pack("<f", unit)
        headers += bytes([EXACT if unit is None else ROUNDED, *contexts]) + end
        channels = Channels(plane.num_channels, first, contexts)
        for row, times in zip(integers, halvings, strict=True):
            if unit is not None:
                low.append(((1 << times) - 1, min(times + 1, MOST_HALVINGS)))
            for lane, (number, about, context) in enumerate(zip(row, channels.predicted, channels.context, strict=True)):
                residual, shift = int(number - about), low_bits(int(context))
                high = residual >> shift
                fits = abs(high) <= MIDDLE
                symbols.append((lane % NUM_LANES, int(context), high + MIDDLE if fits else ESCAPE))
                count = shift if fits else ESCAPE_BITS
                low.append((residual & ((1 << count) - 1), count))
            channels.learn(row)
    words, states = _code(symbols)
    packed = _pack(low)
    sizes = struct.pack(f"<3I{NUM_LANES}I", len(words), len(packed), len(verbatim), *states)
    return headers + sizes + struct.pack(f"<{len(words)}H", *words) + packed + verbatim


def decode(planes: Sequence[KVPlane], stream: bytes, num_bytes: int) -> bytes:
    """Returns the block of a stream."""
    content, headers, at = bytearray(num_bytes), [], 0
    for _ in planes:
        mode, contexts = stream[at], stream[at + 1 : at + 3]
        value = stream[at + 3] if mode == EXACT else struct.unpack_from("<f", stream, at + 3)[0]
        headers.append((mode, contexts, value))
        at += 4 if mode == EXACT else 7
    num_words, num_low, _, *states = struct.unpack_from(f"<3I{NUM_LANES}I", stream, at)
    at += 12 + 4 * NUM_LANES
    words = iter(struct.unpack_from(f"<{num_words}H", stream, at))
    low = _unpack(stream[at + 2 * num_words : at + 2 * num_words + num_low])
    rest = iter(stream[at + 2 * num_words + num_low :])
    for plane, (mode, contexts, value) in zip(planes, headers, strict=True):
        channels = Channels(plane.num_channels, value if mode == EXACT else 0, contexts)
        rows, units = [], []
        for _ in range(plane.num_tokens):
            if mode == ROUNDED:
                times = sum(1 for _ in takewhile(bool, islice(low, MOST_HALVINGS)))
                units.append(np.float32(value) / np.float32(2**times))
            symbols = [_take(states, lane % NUM_LANES, int(x), words) for lane, x in enumerate(channels.context)]
            residuals = [_residual(symbol, int(x), low) for symbol, x in zip(symbols, channels.context, strict=True)]
            rows.append(channels.predicted + np.array(residuals))
            channels.learn(rows[-1])
        integers = np.array(rows)
        if mode == ROUNDED:
            bits = _bits_of(integers.astype(np.float32) * np.array(units)[:, None], plane.number_bytes)
        else:
            width = plane.number_bytes - 1
            raw = [int.from_bytes([next(rest) for _ in range(width)], "little") for _ in range(integers.size)]
            others = np.array(raw).reshape(integers.shape)
            sign, fraction = others >> (8 * width - 1), others & ((1 << (8 * width - 1)) - 1)
            bits = sign << (8 * width + 7) | integers << (8 * width - 1) | fraction
        _write(plane, content, bits)
    return bytes(content)


def _read(plane: KVPlane, content: bytes) -> IntArray:
    """Returns the bits of each number, [num_tokens, num_channels]."""
    kind = "<u2" if plane.number_bytes == 2 else "<u4"
    return (
        np.frombuffer(content[plane.offset :], np.uint8)
        .view(np.uint8)[: _span(plane)]
        .view(kind)[plane.places()]
        .astype(np.int64)
    )


def _write(plane: KVPlane, content: bytearray, bits: IntArray) -> None:
    kind = "<u2" if plane.number_bytes == 2 else "<u4"
    np.frombuffer(content, np.uint8, _span(plane), plane.offset).view(kind)[plane.places()] = bits


def _span(plane: KVPlane) -> int:
    return (int(plane.places().max()) + 1) * plane.number_bytes


def _round(plane: KVPlane, bits: IntArray, step: float) -> tuple[IntArray, float | None, list[int]]:
    """Returns integers, their unit, and how often each position halves it; no unit for numbers that come back as they are."""
    shifted = bits << 16 if plane.number_bytes == 2 else bits
    numbers = shifted.astype(np.uint32).view(np.float32)
    none = [0] * plane.num_tokens
    with np.errstate(invalid="ignore", over="ignore"):
        wide = numbers.astype(np.float64)
        sums, squares = (np.cumsum(part, 0)[-1] for part in (wide, wide * wide))
        total = np.cumsum(squares - sums * sums / plane.num_tokens)[-1]
        unit = np.float32(step) * np.float32(np.sqrt(max(0.0, total) / bits.size))
        if step <= 0 or not np.isfinite(unit):
            return bits, None, none
        unit = max(unit, np.float32(1e-30))  # of zeros
        rows = np.cumsum(wide * wide, 1)[:, -1]
        mean = np.cumsum(rows)[-1] / plane.num_tokens
        halvings = [sum(bool(mean > row * 2 * 4**times) for times in range(MOST_HALVINGS)) for row in rows]
        scaled = numbers * (np.float32(1) / (unit / np.exp2(np.array(halvings, np.float32))))[:, None]
        if not (abs(scaled) < 2**18 - 1).all():
            return bits, None, none
    return np.rint(scaled).astype(np.int64), float(unit), halvings


def _bits_of(numbers: npt.NDArray[np.float32], number_bytes: int) -> IntArray:
    bits = numbers.view(np.uint32).astype(np.int64)
    return bits if number_bytes == 4 else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _code(symbols: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Returns the words and the first states of coders, from the last symbol to the first."""
    words, states = [], [LOWEST] * NUM_LANES
    for lane, context, symbol in reversed(symbols):
        start, end = _STARTS[context][symbol : symbol + 2]
        if states[lane] >= (end - start) << (32 - SCALE_BITS):
            words.append(states[lane] & 0xFFFF)
            states[lane] >>= 16
        whole, rest = divmod(states[lane], end - start)
        states[lane] = (whole << SCALE_BITS) + rest + start
    return words[::-1], states


def _take(states: list[int], lane: int, context: int, words: Iterator[int]) -> int:
    """Returns the next symbol of a coder."""
    slot = states[lane] & ((1 << SCALE_BITS) - 1)
    symbol = next(i for i in range(NUM_SYMBOLS) if slot < _STARTS[context][i + 1])
    start, end = _STARTS[context][symbol : symbol + 2]
    states[lane] = (end - start) * (states[lane] >> SCALE_BITS) + slot - start
    if states[lane] < LOWEST:
        states[lane] = states[lane] << 16 | next(words)
    return symbol


def _residual(symbol: int, context: int, low: Iterator[int]) -> int:
    count = ESCAPE_BITS if symbol == ESCAPE else low_bits(context)
    bits = sum(next(low) << i for i in range(count))
    if symbol == ESCAPE:
        return bits - (bits >> (ESCAPE_BITS - 1) << ESCAPE_BITS)
    return (symbol - MIDDLE) * (1 << count) + bits


def _pack(parts: Sequence[tuple[int, int]]) -> bytes:
    """Returns numbers of so many bits each, the lowest first."""
    bits = [number >> i & 1 for number, count in parts for i in range(count)]
    return np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()


def _unpack(packed: bytes) -> Iterator[int]:
    return iter(np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").tolist())
