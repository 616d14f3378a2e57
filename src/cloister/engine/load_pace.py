"""How much of what has come from tiers a step takes while others decode (decisions/0056). Pure: it is told times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

LOAD_SHARE: Final = 0.05
"""Loads lengthen the steps of others by this part."""
LATEST: Final = 0.5
"""A load may take more than that if it would else take more than this part of the time of computing what it brings."""
_STEP_WEIGHT: Final = 1 / 16
_LOAD_DECAY: Final = 0.9
_FIRST_BYTES: Final = 2**20
_FIRST_S: Final = 0.001
"""What this much is taken to cost before a load was measured."""


class LoadPace:
    """Learns what steps take and what loads add to them, and gives loads their share."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._cost_s, self._cost_bytes = _FIRST_S, float(_FIRST_BYTES)
        self._credit_s = 0.0

    @property
    def byte_s(self) -> float:
        """What a byte is predicted to add to a step."""
        return self._cost_s / self._cost_bytes

    def note_step(self, step_s: float) -> None:
        """Notes what a step took that only decoded, from its beginning to that of the next one."""
        self._step_s = step_s if self._step_s is None else self._step_s + _STEP_WEIGHT * (step_s - self._step_s)

    def note_load(self, num_bytes: int, cost_s: float) -> None:
        """Notes what a step took from loads, and by how much it was longer for that."""
        self._credit_s -= num_bytes * self.byte_s
        self._cost_s = _LOAD_DECAY * self._cost_s + cost_s
        self._cost_bytes = _LOAD_DECAY * self._cost_bytes + num_bytes

    def grant(self, loads: Iterable[tuple[int, float]]) -> int:
        """Returns how many bytes the next step may take from loads; 0: none. More than 0 lets it take one entry at least, which
        later steps make up for.

        Args:
            loads: bytes of each load under way, and what computing them is predicted to take.
        """
        if self._step_s is None:
            return 1
        hurry = sum(num_bytes * self.byte_s / (LATEST * compute_s) for num_bytes, compute_s in loads if compute_s > 0.0)
        earned_s = self._step_s * max(LOAD_SHARE, hurry)
        self._credit_s = min(self._credit_s, 0.0) + earned_s  # what was not used is not kept
        return max(1, int(self._credit_s / self.byte_s)) if self._credit_s > 0.0 else 0

    def rest(self) -> None:
        """Notes that nobody decodes: loads take what they can, and owe nothing for it."""
        self._credit_s = 0.0
