"""Heartbeats over a worker's channel to an engine of another machine: both ends notice a network that holds the connection open
but passes on little or nothing. Pure: no I/O, no clock.

The worker sends an empty record, and the engine answers with one, behind all that it has sent before. Records are sealed and
numbered, so nobody else can make an answer or deliver it ahead of the rest: an attacker can delay data by at most `LATE_S`, or
the connection ends. Time is counted in looks. A process that gets no processor time makes none, so a starved process declares
nobody lost, though others may declare it lost.
"""

from __future__ import annotations

from typing import Final

LOOK_S: Final = 0.5
"""Time between two looks of either end."""
PAUSE_S: Final = 1.0
"""Time from an answer to the next heartbeat."""
LATE_S: Final = 6.0
"""How long a worker waits for an answer; longer by what else passes (`SLOWEST_BYTES_S`)."""
SLOWEST_BYTES_S: Final = 2**20
"""Least bandwidth of a network between machines of a unit, in bytes per second."""
SILENT_S: Final = 10.0
"""How long an engine waits for the next record; longer by what it sends, because a worker sends its next heartbeat once it has
the last answer."""


class Heartbeat:
    """The worker's side of one channel."""

    def __init__(self) -> None:
        self._num_looks = self._num_bytes = self._num_behind = 0
        self._is_awaited = False

    def note_received(self, num_bytes: int) -> None:
        """Called with what was received."""
        self._num_bytes += num_bytes

    def note_sent(self, num_bytes: int) -> None:
        """Called with what was written, which may wait for the network."""
        self._num_bytes += num_bytes
        self._num_behind += num_bytes

    def note_answer(self) -> None:
        """Called when the engine has answered. What was written behind the heartbeat may still be ahead of the next one."""
        self._num_looks, self._num_bytes = 0, self._num_behind
        self._is_awaited = False

    def look(self) -> bool:
        """Called every `LOOK_S`; returns whether to send a heartbeat now."""
        self._num_looks += 1
        if self._is_awaited or self._num_looks * LOOK_S < PAUSE_S:
            return False
        self._num_looks, self._is_awaited, self._num_behind = 0, True, 0
        return True

    @property
    def is_late(self) -> bool:
        """Whether the engine has not answered in time."""
        return self._is_awaited and self._num_looks * LOOK_S > LATE_S + self._num_bytes / SLOWEST_BYTES_S


class Silence:
    """The engine's side of one channel."""

    def __init__(self) -> None:
        self._num_looks = self._num_bytes = 0

    def note_record(self) -> None:
        """Called with each record of the worker."""
        self._num_looks = self._num_bytes = 0

    def note_sent(self, num_bytes: int) -> None:
        """Called with what the network has taken."""
        self._num_bytes += num_bytes

    def look(self) -> None:
        """Called every `LOOK_S`."""
        self._num_looks += 1

    @property
    def is_long(self) -> bool:
        """Whether the worker can no longer be reached."""
        return self._num_looks * LOOK_S > SILENT_S + self._num_bytes / SLOWEST_BYTES_S
