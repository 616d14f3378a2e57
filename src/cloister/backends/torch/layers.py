"""What happens to each row on its own: norms, rotation, activation.

Only operations whose bits do not depend on where a row lies: sums along a row, correctly rounded arithmetic, and exp and
tanh on whole vectors (`program` pads the rows to at least 8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.spec import RopeSpec

_CHUNK = 1024  # positions whose angles are computed together


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019), in float32.

    The root is a square root and a division, which are correctly rounded everywhere, not a reciprocal root.
    """
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows.div(length.square_().div_(rows.shape[-1]).add_(eps).sqrt_()).mul_(weight)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
}


class RopeTable:
    """Cosines and sines by position, computed in chunks of fixed shape as positions come up."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._scale = spec.attention_scale
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
        self._table = torch.empty(2, 0, len(spec.inv_freq), device=device)

    def at(self, positions: Tensor, num_positions: int) -> Tensor:
        """Returns [2, num_rows, 1, head_dim / 2], cosines then sines.

        Args:
            num_positions: greater than every position.
        """
        missing = range(self._table.shape[1], num_positions, _CHUNK)
        if missing:
            self._table = torch.cat([self._table, *(self._chunk(start) for start in missing)], dim=1)
        return self._table.index_select(1, positions).unsqueeze(2)

    def _chunk(self, start: int) -> Tensor:
        positions = torch.arange(start, start + _CHUNK, dtype=torch.float32, device=self._inv_freq.device)
        angles = torch.outer(positions, self._inv_freq)
        return torch.stack([angles.cos(), angles.sin()]).mul_(self._scale)


def rotate(heads: Tensor, cos_sin: Tensor, turned: Tensor) -> None:
    """Writes [num_rows, num_heads, head_dim] turned by position (Su et al. 2021), pairing the halves of a head."""
    cos, sin = cos_sin
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    torch.sub(first * cos, second * sin, out=turned[..., :half])
    torch.add(second * cos, first * sin, out=turned[..., half:])
