"""Restores from both sides (Cake, Jin et al. 2024; decisions/0055): the front of a prefix is computed while its end is loaded,
until both meet. Pure: no I/O, no clock, no arrays.

KV of a block depends on all tokens before it, but on them alone: a block that was loaded is the one that computing would have
made. So computing may leave out what has arrived, from the last block on. Alone, loading takes L and computing C; from
both sides it takes about L C / (L + C), at best half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

MAX_TIME_RATIO: Final = 0.75
"""A restore is made from both sides if its predicted time is at most this part of that of loading alone and of computing alone.
Restores predicted to gain less were measured to gain nothing: both sides share the processor."""
FIRST_SHARE: Final = 0.5
"""The first steps compute only this part of the entries up to the predicted meeting point, until the load has shown its speed:
a tier that has become much faster is then noticed in time."""
PRIOR_SHARE: Final = 0.1
"""Weight of a tier's earlier measurements, as a part of this load's bytes: the first blocks include the start of the load."""
NUM_PARTS: Final = 16
"""Number of parts in which the end is read, if blocks are small enough. A part that is read when both sides meet is wasted."""
MIN_PART_S: Final = 0.001
"""Minimum predicted seconds of a part: many small reads would make a fast tier slow."""

ComputeTime = Callable[[int, int], float]
"""Predicted seconds for computing entries [start, end)."""


class TwoSidedRestore:
    """One restore, of entries [first, end).

    Args:
        first: the first entry that the device lacks.
        sizes: (tier, bytes) of each entry, from the first one on.
        byte_s: seconds for a byte of each tier, as far as loads were measured.

    Attributes:
        end: one past the last entry.
        owner: whose blocks they are (`TierBlock.owner`).
        measured: (bytes, seconds) of each tier, of all that has arrived; empty before the first.
    """

    def __init__(self, first: int, sizes: Sequence[tuple[int, int]], byte_s: Sequence[float], owner: bytes = b"") -> None:
        self.first, self.end = first, first + len(sizes)
        self.owner = owner
        self.measured: Sequence[tuple[int, float]] = ()
        self._known_byte_s, self._byte_s = list(byte_s), list(byte_s)
        self._before = [
            [0, *accumulate(num_bytes if tier == number else 0 for tier, num_bytes in sizes)] for number in range(len(byte_s))
        ]

    @property
    def part_bytes(self) -> int:
        """Bytes of a part of the load."""
        num_bytes = sum(before[-1] for before in self._before)
        slowest_byte_s = max(self._known_byte_s)
        least = MIN_PART_S / slowest_byte_s if slowest_byte_s * num_bytes > MIN_PART_S else num_bytes
        return int(max(num_bytes / NUM_PARTS, least))

    def note(self, measured: Sequence[tuple[int, float]]) -> None:
        """Takes (bytes, seconds) of each tier, of all that has arrived of this load."""
        self.measured = measured
        for tier, (num_bytes, elapsed_s) in enumerate(measured):
            weight = PRIOR_SHARE * self._before[tier][-1]
            if num_bytes:
                self._byte_s[tier] = (elapsed_s + weight * self._known_byte_s[tier]) / (num_bytes + weight)

    def predict_load_s(self, start: int, end: int) -> float:
        """Returns the predicted seconds of loading entries [start, end)."""
        return sum(
            byte_s * (before[end - self.first] - before[start - self.first])
            for byte_s, before in zip(self._byte_s, self._before, strict=True)
        )

    def predict_s(self, compute_s: ComputeTime) -> float:
        """Returns the predicted seconds of the whole restore."""
        place = self.find_meeting(self.first, self.end, compute_s)
        return max(compute_s(self.first, place), self.predict_load_s(place, self.end))

    def find_meeting(self, front: int, back: int, compute_s: ComputeTime) -> int:
        """Returns the first entry that is loaded in time: computing [front, entry) takes at least as long as loading
        [entry, back).

        Args:
            front: the first entry that was not computed.
            back: the first one that has arrived.
        """
        least, most = front, back
        while least < most:
            place = (least + most) // 2
            if compute_s(front, place) >= self.predict_load_s(place, back):
                most = place
            else:
                least = place + 1
        return least

    def find_next(self, front: int, back: int, compute_s: ComputeTime) -> int:
        """Returns the entry at which the next step ends: at least one entry is computed, and none that has arrived."""
        way = self.find_meeting(front, back, compute_s) - front
        if not any(num_bytes for num_bytes, _ in self.measured):
            way = round(way * FIRST_SHARE)
        return min(back, front + max(1, way))
