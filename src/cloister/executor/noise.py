"""Counter-based sampling noise: a pure function of (seed, sequence index, position, token id); no state.

The same idea as Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": a counter is hashed instead of advancing a
state, so each token's noise is independent of order and of other requests.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
KeyArray = npt.NDArray[np.uint64]
UniformArray = npt.NDArray[np.float64]
BitArray = npt.NDArray[np.uint32]

_LARGEST_BELOW_ONE = np.float32(1 - 2**-24)


def noise_keys(seeds: KeyArray, indexes: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> KeyArray:
    """Returns one 64-bit key per row [num_rows] from its seed, its index among the n sequences, and the position."""
    keys = _mix64(seeds)
    keys = _mix64(keys ^ indexes.astype(np.uint64))
    return _mix64(keys ^ positions.astype(np.uint64))


class Domain(IntEnum):
    """Purposes of uniform numbers. Each has its own numbers, independent of those of `Noise`."""

    DRAFT = 1
    VERIFY = 2


def uniforms(keys: KeyArray, domain: Domain, ordinals: npt.NDArray[np.int64]) -> UniformArray:
    """Returns numbers uniform in [0, 1), one for each key of `noise_keys` and ordinal; shapes broadcast."""
    mixed = _mix64(keys ^ np.uint64(domain << 56))
    numbers: UniformArray = (_mix64(mixed ^ ordinals.astype(np.uint64)) >> np.uint64(11)) * np.float64(2.0**-53)
    return numbers


class Noise:
    """Exponential(1) noise per (key, id), for ids below `num_ids`: tokens, or groups of them.

    With weights w, argmax(w / noise) is a draw from w / sum(w): the exponential race, which is the Gumbel-max trick
    (Maddison et al. 2014) without its second logarithm.
    """

    def __init__(self, num_ids: int) -> None:
        self._ids = _mix32(np.arange(1, num_ids + 1, dtype=np.uint32))

    def at(self, keys: KeyArray, ids: npt.NDArray[np.int64]) -> FloatArray:
        """Returns the noise of each id under each key; shapes broadcast."""
        return _exponential(_keyed_bits(self._ids[ids], keys))


def _keyed_bits(ids: BitArray, keys: KeyArray) -> BitArray:
    """Mixes ids (already mixed once) with both halves of a key. Shapes broadcast."""
    bits = ids ^ (keys >> np.uint64(32)).astype(np.uint32)
    bits = _mix32(bits)
    bits += keys.astype(np.uint32)
    return _mix32(bits)


def _exponential(bits: BitArray) -> FloatArray:
    """Maps uniform bits to Exponential(1), never 0 and never infinite.

    Small values decide the race, and float32 is most precise there: v = (bits + 1/2) / 2^32 keeps its relative precision
    towards 0; 1 - v would not.
    """
    values = bits.astype(np.float32)
    values += np.float32(0.5)
    values *= np.float32(2.0**-32)
    np.minimum(values, _LARGEST_BELOW_ONE, out=values)
    np.negative(values, out=values)
    np.log1p(values, out=values)
    np.negative(values, out=values)
    return values


def _mix32(bits: BitArray) -> BitArray:
    """Full-avalanche permutation of 32 bits: xor-shift and multiply, as the finaliser of MurmurHash3 (Appleby)."""
    bits = bits ^ (bits >> np.uint32(16))
    bits *= np.uint32(0x85EBCA6B)
    bits ^= bits >> np.uint32(13)
    bits *= np.uint32(0xC2B2AE35)
    bits ^= bits >> np.uint32(16)
    return bits


def _mix64(bits: KeyArray) -> KeyArray:
    """One step of SplitMix64 (Steele, Lea and Flood 2014)."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
