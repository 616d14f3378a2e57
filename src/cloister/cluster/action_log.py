"""Counts and logs the actions of controllers and operators on replicas, for the log and metrics. Holds nothing about
requests."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final

from cloister.cluster.migration import Move
from cloister.types.clock import Clock

MOVES_EVERY_S: Final = 60.0
"""Moves are logged as sums, at most so often: a line for each would tell when single requests ran."""
MOVE_WORDS: Final = {"level": "to level load", "room": "to make room", "headroom": "to keep room for urgent ones"}
ACTIONS: Final = (*(f"move_to_{reason}" for reason in MOVE_WORDS), "drain", "flip", "update", "add", "remove")

_logger = logging.getLogger(__name__)


class ActionLog:
    """Counts and logs actions.

    Attributes:
        counts: by action (`ACTIONS`).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts = Counter(dict.fromkeys(ACTIONS, 0))
        self._logged_s = clock.now()
        self._num_logged = 0

    @property
    def counts(self) -> Mapping[str, int]:
        return self._counts

    def note_move(self, move: Move) -> None:
        """Counts a move by load."""
        self._counts[f"move_to_{move.reason}"] += 1

    def note_drain(self, index: int) -> None:
        """Counts and logs that a replica is being drained."""
        self._note("drain", "replica %d is drained", index)

    def note_flip(self, index: int, role: str) -> None:
        """Counts and logs that a replica gets another role."""
        self._note("flip", "replica %d changes its role to %s", index, role)

    def note_update(self) -> None:
        """Counts and logs that a rolling update begins."""
        self._note("update", "a rolling update begins")

    def note_addition(self, index: int) -> None:
        """Counts and logs that a replica gets an engine, because the others are busy or too few."""
        self._note("add", "replica %d is added", index)

    def note_removal(self, index: int) -> None:
        """Counts and logs that a replica is emptied and its engine ends, because fewer are enough."""
        self._note("remove", "replica %d is removed", index)

    def log_moves(self) -> None:
        """Logs the sums of moves, if there are new ones and the last line was long enough ago."""
        sums = {reason: self._counts[f"move_to_{reason}"] for reason in MOVE_WORDS}
        if sum(sums.values()) == self._num_logged or self._clock.now() - self._logged_s < MOVES_EVERY_S:
            return
        self._logged_s, self._num_logged = self._clock.now(), sum(sums.values())
        text = ", ".join(f"{sums[reason]} {words}" for reason, words in MOVE_WORDS.items())
        _logger.info("running requests moved by load so far: %s", text)

    def _note(self, action: str, text: str, *args: object) -> None:
        self._counts[action] += 1
        _logger.info(text + " (%s %d since the start)", *args, action, self._counts[action])
