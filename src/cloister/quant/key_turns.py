"""Rotary pairs of keys, turned and scaled so that a 4-bit cache rounds them finely, and queries the other way: q . k stays.

A pair of channels is a complex number, and rotary embedding multiplies it by another (Su et al. 2021, section 3.2.2); so any
factor c on the keys' side and 1 / conj(c) on the queries' passes through it, exactly and at no cost. SmoothAttention (Lin et
al. 2024, QServe, section 4.2) is the case of real c. The angle adds this: what a channel always holds can be brought to the
same value in every channel, where a zero point takes it out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import LayerSpec
from cloister.quant.base import FloatArray
from cloister.quant.folding import FloatTensors
from cloister.quant.smooth_attention import smoothing_factors

ComplexArray = npt.NDArray[np.complex64]

_NUM_ANGLES = 16
_SCALES = np.array([0.8, 0.9, 1.0, 1.12, 1.25], np.float32)
_NUM_SWEEPS = 3  # over all pairs; angles grow finer by half in each


def turn_keys(tensors: FloatTensors, layer: LayerSpec, keys: FloatArray, queries: FloatArray) -> FloatTensors:
    """Returns the tensors with the rows of `q` and `k`, and their biases, turned; the layer computes the same.

    Args:
        tensors: one layer's, whose heads are not normalised: a norm's weight stands between and cannot turn.
        keys: [num_tokens, num_kv_heads, head_dim] after rotation, of some text.
        queries: [num_tokens, num_heads, head_dim] of the same.
    """
    spec = layer.attention
    sizes: FloatArray = np.sqrt(np.square(keys).mean(0))
    smooth = smoothing_factors(sizes, layer)
    half, group = spec.head_dim // 2, spec.num_heads // spec.num_kv_heads
    energies = np.square(queries).mean(0).reshape(spec.num_kv_heads, group, 2, half).sum((1, 2))
    start: FloatArray = np.float32(1) / smooth[:, :half]
    turns = np.stack([search_turns(keys[:, head], energies[head], start[head]) for head in range(spec.num_kv_heads)])
    opposite = np.repeat(1 / turns.conj(), group, axis=0)
    changed = dict(tensors)
    for name, factors in (("k", turns), ("q", opposite)):
        for part in (f"{name}.weight", f"{name}.bias"):
            if part in tensors:
                changed[part] = turn_rows(tensors[part], factors)
    return changed


def search_turns(keys: FloatArray, energies: FloatArray, start: FloatArray) -> ComplexArray:
    """Returns the factor of each pair, [head_dim / 2], by descent over one pair after another.

    What it lowers is the squared error of q . k: a cache with a scale per token and head errs alike in all channels, by a
    share of their range, and each channel's error counts as much as the queries that meet it: mean(range^2) * sum(|q|^2).

    Args:
        keys: [num_tokens, head_dim].
        energies: [head_dim / 2] mean square of the queries' pairs.
        start: [head_dim / 2] factors to begin with.
    """
    half = len(start)
    pairs = keys[:, :half] + 1j * keys[:, half:]
    turns = start.astype(np.complex64)
    for sweep in range(_NUM_SWEEPS):
        candidates = np.outer(_angles(sweep), _SCALES).reshape(-1).astype(np.complex64)
        for pair in range(half):
            turned = pairs * turns
            others = np.delete(turned, pair, axis=1).view(np.float32)
            ranges = _ranges(turned[:, pair, None] * candidates, others)
            costs = energies / np.square(np.abs(turns))
            rest = costs.sum() - costs[pair]
            errors = np.square(ranges).mean(0) * (rest + costs[pair] / np.square(np.abs(candidates)))
            turns[pair] *= candidates[errors.argmin()]
    return turns


def _angles(sweep: int) -> ComplexArray:
    """All around at first, then ever nearer to what was found."""
    angles = np.arange(_NUM_ANGLES) * (2 * np.pi / _NUM_ANGLES)
    if sweep > 0:
        reach = 2 * np.pi / _NUM_ANGLES / 2 ** (sweep - 1)
        angles = np.linspace(-reach, reach, _NUM_ANGLES // 2 + 1)
    turned: ComplexArray = np.exp(1j * angles).astype(np.complex64)
    return turned


def _ranges(pair: ComplexArray, others: FloatArray) -> FloatArray:
    """The range of each token's head, [num_tokens, num_candidates], with other channels [num_tokens, head_dim - 2]."""
    highest = np.maximum(pair.real, pair.imag)
    lowest = np.minimum(pair.real, pair.imag)
    if others.shape[1]:
        highest = np.maximum(highest, others.max(1, keepdims=True))
        lowest = np.minimum(lowest, others.min(1, keepdims=True))
    ranges: FloatArray = highest - lowest
    return ranges


def turn_rows(rows: FloatArray, turns: ComplexArray) -> FloatArray:
    """Returns a projection's rows [num_heads * head_dim, in], or a bias, with each pair multiplied by its factor.

    Args:
        turns: [num_heads, head_dim / 2].
    """
    halves = rows.reshape(len(turns), 2, turns.shape[1], -1)
    turned = (halves[:, 0] + 1j * halves[:, 1]) * turns[..., None]
    joined: FloatArray = np.stack([turned.real, turned.imag], axis=1).astype(np.float32).reshape(rows.shape)
    return joined
