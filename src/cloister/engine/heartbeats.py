"""Heartbeats over a worker's channel to an engine of another machine: both ends notice a network that holds the connection open
and passes nothing on, or little of it. Pure: no I/O, no clock.

The worker sends an empty record, and the engine answers with one, behind all that it has sent before. Records are sealed and
numbered, so nobody else can make an answer, and nobody can let it pass before the rest: what an attacker holds back is at most
`LATE_S` late, or the connection ends. Time is counted in looks, which a process that gets no processor time does not make: so a
starved process takes nobody for lost, though others may take it for lost.
"""

from __future__ import annotations

from typing import Final

LOOK_S: Final = 0.5
"""Between two looks of either end."""
PAUSE_S: Final = 1.0
"""From an answer to the next heartbeat."""
LATE_S: Final = 6.0
"""A worker waits so long for an answer, and longer for what else passes (`SLOWEST_BYTES_S`)."""
SLOWEST_BYTES_S: Final = 2**20
"""What a network between machines of a unit carries at least, bytes per second."""
SILENT_S: Final = 10.0
"""An engine waits so long for the next record, and longer for what it sends: a worker sends its next heartbeat once it has the
last answer."""


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
        """Called every `LOOK_S`; returns whether a heartbeat is to be sent now."""
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
        """Whether the worker is not reached any more."""
        return self._num_looks * LOOK_S > SILENT_S + self._num_bytes / SLOWEST_BYTES_S
