"""What happens to each row on its own: norms, rotation, activation, soft caps.

Only operations whose bits do not depend on where a row lies: sums along a row, correctly rounded arithmetic, and exp and
tanh on whole vectors (`program` pads the rows to at least 8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.spec import RopeSpec

_CHUNK = 1024  # positions whose angles are computed together
_VECTOR = 32  # numbers that torch takes at once, at most; what is left over is rounded otherwise


def rms_norm(rows: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019), in float32.

    The root is a square root and a division, which are correctly rounded everywhere, not a reciprocal root.
    """
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    normed = rows.div(length.square_().div_(rows.shape[-1]).add_(eps).sqrt_())
    return normed if weight is None else normed.mul_(weight)


class Norm:
    """A norm of the residual stream, in float32.

    Args:
        kind: "rms", or "layer" (Ba et al. 2016), which takes the mean away first.
        weight, bias: [hidden]; the bias may be None.
    """

    def __init__(self, kind: Literal["rms", "layer"], weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._kind, self._weight, self._bias, self._eps = kind, weight, bias, eps

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns rows [num_rows, hidden] normalised."""
        if self._kind == "layer":  # torch computes each row by the same steps, whatever their number
            return F.layer_norm(rows, self._weight.shape, self._weight, self._bias, self._eps)
        normed = rms_norm(rows, self._weight, self._eps)
        return normed if self._bias is None else normed.add_(self._bias)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda rows: F.relu(rows).square(),
}


def cap(rows: Tensor, limit: float) -> Tensor:
    """Bends numbers into (-limit, limit), in place: limit * tanh(x / limit) (Gemma 2, Riviere et al. 2024, section 2)."""
    return rows.div_(limit).tanh_().mul_(limit)


def on_whole_vectors(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Returns function(rows) of one number each, with rows [num_rows, size] padded so that none ends inside of a vector."""
    missing = -rows.shape[1] % _VECTOR
    return function(F.pad(rows, (0, missing)))[:, : rows.shape[1]] if missing else function(rows)


class RopeTable:
    """Cosines and sines by position, computed in chunks of fixed shape as positions come up."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._scale = spec.attention_scale
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
        self._table = torch.empty(2, 0, len(spec.inv_freq), device=device)
        self._axes = torch.tensor(spec.axes, device=device) if spec.axes else None

    def at(self, positions: Tensor, num_positions: int) -> Tensor:
        """Returns [2, num_rows, 1, num_frequencies], cosines then sines.

        Args:
            positions: [num_rows], or [3, num_rows] where tokens have three (`RopeSpec.axes`); without axes, all three alike.
            num_positions: greater than every position.
        """
        missing = range(self._table.shape[1], num_positions, _CHUNK)
        if missing:
            self._table = torch.cat([self._table, *(self._chunk(start) for start in missing)], dim=1)
        if positions.dim() == 1:
            return self._table.index_select(1, positions).unsqueeze(2)
        if self._axes is None and bool((positions == positions[0]).all()):
            return self._table.index_select(1, positions[0]).unsqueeze(2)
        if self._axes is None:
            raise ValueError("tokens with three positions need a rotation that says which of them turns each frequency")
        chosen = positions.index_select(0, self._axes)  # [num_frequencies, num_rows]
        return self._table.gather(1, chosen.T.expand(2, -1, -1)).unsqueeze(2)

    def _chunk(self, start: int) -> Tensor:
        positions = torch.arange(start, start + _CHUNK, dtype=torch.float32, device=self._inv_freq.device)
        angles = torch.outer(positions, self._inv_freq)
        return torch.stack([angles.cos(), angles.sin()]).mul_(self._scale)


def rotate(heads: Tensor, cos_sin: Tensor | None, turned: Tensor, *, interleaved: bool = False) -> None:
    """Writes [num_rows, num_heads, head_dim] turned by position (Su et al. 2021), pairing the halves of what is turned.

    That is a head's first 2 * num_frequencies numbers; the rest, or everything where there are no angles, stays as it is.
    Interleaved pairs are neighbours in `heads`; they are written half-split like others, which changes no product of two heads.
    """
    half = 0 if cos_sin is None else cos_sin.shape[-1]
    if cos_sin is not None:
        cos, sin = cos_sin
        part = heads[..., : 2 * half]
        first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
        torch.sub(first * cos, second * sin, out=turned[..., :half])
        torch.add(second * cos, first * sin, out=turned[..., half : 2 * half])
    if 2 * half < heads.shape[-1]:
        turned[..., 2 * half :] = heads[..., 2 * half :]
