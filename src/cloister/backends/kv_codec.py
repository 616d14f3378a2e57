"""A codec for KV that is stored or sent: CacheGen (Liu et al. 2024), with contexts in place of profiled models.

Numbers of a channel become integers: the exponent of each, or, with loss, its multiple of a step. An integer is coded as its
difference from a running mean of the channel, with a static model that a running size of these differences chooses, by rANS
(Duda 2013). So nothing is profiled for a model, nothing but a step and two contexts is sent for a plane, and a block is decoded
without any other. A position whose numbers are much smaller than those of its plane has finer steps: such are attention sinks
(Xiao et al. 2024), whose values would be lost in the step of the others and which every later token reads.

The stream, little-endian. For each plane: its mode (1 exact, 2 rounded), the contexts of its first and second position, and
the exponent that the first position is about (one byte), or the step (float32). Then the numbers of words, of bytes of low bits
and of other bytes, the states of 16 rANS coders (channel c has coder c % 16), and these three sections. A rounded number is an
integer times the step of its position in float32, rounded to nearest: the plane's step, halved as often as there are ones
before the low bits of the position (with a zero behind them, if fewer than 7). An exact number has its exponent coded and its
other bits as they are. `native/cpp/kv_codec.cpp` has the integer arithmetic in full, `tests/backends/kv_codec_oracle.py` the
same in numpy.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

NUM_CONTEXTS: Final = 24
"""Context h has differences of about 2^(h/2) sixteenths."""
NUM_SYMBOLS: Final = 64
"""Differences from -31 to 31, and one for those beyond."""
SCALE_BITS: Final = 12
NARROW_CONTEXTS: Final = 15
"""From this context on, low bits of a difference are written as they are."""
FREEDOM: Final = 7
"""Degrees of freedom of the t distribution that differences are taken to have. Fitted on KV of three models (cloister-5m,
SmolLM2-135M, Gemma 3 270M): within 0.01 bits of the best static models there."""
FLOOR_SIXTEENTHS: Final = 6
"""Rounding to integers widens every distribution by about so much."""


def low_bits(context: int) -> int:
    """Returns how many low bits of a difference are written as they are."""
    return 0 if context < NARROW_CONTEXTS else (context - NARROW_CONTEXTS) // 2 + 1


@cache
def make_frequencies() -> npt.NDArray[np.uint16]:
    """Returns how many of 4,096 slots each symbol has in each context, [NUM_CONTEXTS, NUM_SYMBOLS]; integer arithmetic only."""
    rows = [_share(context) for context in range(NUM_CONTEXTS)]
    frequencies = np.array(rows, np.uint16)
    frequencies.flags.writeable = False
    return frequencies


def _share(context: int) -> list[int]:
    """Returns the slots of one context's symbols."""
    middle, unit = NUM_SYMBOLS // 2 - 1, 1 << low_bits(context)
    # The scale of the distribution, in 32nds: the middle of what the context stands for, and the floor.
    scale = _size(context) + _size(context + 1) + 2 * FLOOR_SIXTEENTHS
    weights = []
    for symbol in range(NUM_SYMBOLS - 1):
        centre = 32 * (symbol - middle) * unit + 16 * (unit - 1)
        weights.append((FREEDOM * scale**2) ** 4 * 2**64 // (FREEDOM * scale**2 + centre**2) ** 4)
    total, free = sum(weights), (1 << SCALE_BITS) - NUM_SYMBOLS
    slots = [1 + weight * free // total for weight in weights] + [1]
    slots[slots.index(max(slots))] += (1 << SCALE_BITS) - sum(slots)
    return slots


def _size(context: int) -> int:
    """Returns the least size of a context, in sixteenths."""
    return (3 if context % 2 else 2) * (1 << context // 2) // 2 - 1
