"""Low-rank adapters in torch: the products that a step's rows add for their adapters.

The rows of one adapter are gathered, padded to whole tiles and multiplied by A and then by B, so that a row's bits do not
depend on how many others have its adapter (batch invariance); rows without one are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cloister.backends.adapters import AdapterWeights, target_shapes
from cloister.backends.base import ForwardBatch
from cloister.backends.spec import DecoderSpec
from cloister.backends.torch.linear import Linear, common_tiles, pad_rows
from cloister.backends.torch.schedule import Team


class _Update:
    """B A of one product."""

    def __init__(self, down: Linear, up: Linear) -> None:
        self._down, self._up = down, up
        self._tiles = common_tiles(down.tiles, up.tiles)

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns what [num_rows, inputs] gain, [num_rows, outputs]."""
        padded = rows.new_zeros(pad_rows(len(rows), self._tiles), rows.shape[1])
        padded[: len(rows)] = rows
        return self._up(self._down(padded))[: len(rows)]


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of some rows of a step.

    Attributes:
        groups: (updates by product, places of the rows that have them), for each adapter among these rows.
        heights: outputs of every product that an adapter may change.
    """

    groups: Sequence[tuple[Mapping[str, _Update], Tensor]]
    heights: Mapping[str, int]

    def add(self, prefix: str, names: Sequence[str], rows: Tensor, out: Tensor) -> None:
        """Adds to the outputs of products that were computed as one, in place.

        Args:
            names: products of the layer `prefix`, whose outputs stand side by side in `out` [num_rows, outputs].
            rows: [num_rows, inputs].
        """
        for updates, places in self.groups:
            start, chosen = 0, rows.index_select(0, places)
            for name in (f"{prefix}.{name}" for name in names):
                end = start + self.heights[name]
                if name in updates:
                    out[:, start:end].index_add_(0, places, updates[name](chosen).to(out.dtype))
                start = end


class TorchAdapters:
    """The adapters of one program, by slot; their products are of the program's type."""

    def __init__(self, spec: DecoderSpec, team: Team, dtype: torch.dtype, device: torch.device) -> None:
        self._team, self._dtype, self._device = team, dtype, device
        self._heights = {name: outputs for name, (outputs, _) in target_shapes(spec).items()}
        self._slots: dict[int, Mapping[str, _Update]] = {}

    def load(self, slot: int, adapter: AdapterWeights) -> None:
        self._slots[slot] = {
            name: _Update(*(Linear(self._to_torch(matrix), None, self._team) for matrix in pair))
            for name, pair in adapter.updates.items()
        }

    def unload(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def of_step(self, batch: ForwardBatch) -> np.ndarray | None:
        """Returns the slot of each token's adapter, [num_tokens]; None if no token has one."""
        if batch.adapters is None or not any(slot in self._slots for slot in batch.adapters.tolist()):
            return None
        return np.repeat(batch.adapters, np.diff(batch.query_starts))

    def of_rows(self, slots: np.ndarray | None, rows: slice) -> RowAdapters | None:
        """Returns the adapters of a run of a step's rows; None if none of them has one."""
        if slots is None:
            return None
        chosen = slots[rows]
        groups = [
            (self._slots[slot], torch.from_numpy(np.flatnonzero(chosen == slot)).to(self._device))
            for slot in sorted(set(chosen.tolist()))
            if slot in self._slots
        ]
        return RowAdapters(groups, self._heights) if groups else None

    def _to_torch(self, matrix: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(matrix)).to(self._device, self._dtype)
