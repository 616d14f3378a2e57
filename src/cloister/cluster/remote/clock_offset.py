"""Estimates the offset between another machine's monotonic clock and this one's. Pure."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from cloister.types.events import Ended, Event

_DRIFT: Final = 0.0002
"""Clocks of machines drift apart by less than this share (crystals: 100 ppm each at worst)."""


class ClockOffset:
    """Converts times of another clock to this one. The offset is the least difference seen between arrival and departure of a
    frame; it is too large by the delay of the fastest frame, so no event seems later than its message.
    """

    def __init__(self) -> None:
        self._offset_s = math.inf
        self._noted_s = 0.0

    def note(self, sent_s: float, received_s: float) -> None:
        """Takes the times of one frame, by the sender's clock and by this one."""
        allowed_s = self._offset_s + _DRIFT * (received_s - self._noted_s)
        self._offset_s, self._noted_s = min(allowed_s, received_s - sent_s), received_s

    def shift(self, event: Event) -> Event:
        """Returns an event of the other machine with times of this clock."""
        changes: dict[str, float] = {"now_s": event.now_s + self._offset_s}
        if isinstance(event, Ended):
            changes["arrival_s"] = event.arrival_s + self._offset_s
            if event.first_token_s is not None:
                changes["first_token_s"] = event.first_token_s + self._offset_s
        return msgspec.structs.replace(event, **changes)
