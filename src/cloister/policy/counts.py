"""Metrics under profiles that allow counts only: `/metrics` shows an allow-list, updated after a threshold of requests; a
sealed node shows counts per minute with noise. Pure: time and randomness are arguments.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from cloister.types.threat import Requirement, ThreatProfile

PROFILING_THREAT = ThreatProfile(
    row="global profiling",
    threats=frozenset({Requirement.NO_PRIVILEGED_ACCESS}),
    residue="statistics",
    where=("host memory",),
    attack="operator view into content",
    mitigations=("counts only, from an allow-list, updated after a threshold of requests; with keys for operators only",),
)

ALLOWED_COUNTS = frozenset({"requests", "prompt_tokens", "generation_tokens", "steps", "num_preemptions"})
"""Totals over all requests. Cached tokens, times, finish reasons and queue lengths are excluded: each reveals single
requests."""

THRESHOLD = 20
"""Requests that must end between two publications, so that each figure sums over at least this many."""


class CountRelease:
    """Publishes counts so seldom that none can be traced to one request (after k-anonymity, Sweeney 2002).

    Published counts do not change until `threshold` more requests have ended, so the difference of two readings never covers
    fewer. A party that sends `threshold - 1` of them can derive the figures of the last one: this protects against an observing
    operator, not against one who floods the server, so tenants are shown none of them.

    Args:
        names: counts that may be published; all others are withheld.
        threshold: requests between two publications, at least 2.
    """

    def __init__(self, names: frozenset[str] = ALLOWED_COUNTS, threshold: int = THRESHOLD) -> None:
        if threshold < 2:
            raise ValueError("a threshold of fewer than two requests protects nobody")
        self._names = names
        self.threshold = threshold
        self._num_published = 0
        self._shown: dict[str, float] = {}

    def publish(self, num_ended: int, counts: Mapping[str, float]) -> dict[str, float]:
        """Returns the counts that may be published now.

        Args:
            num_ended: requests that ended since the server started.
            counts: running totals by name.
        """
        if num_ended - self._num_published >= self.threshold:
            self._num_published = num_ended
            self._shown = {name: value for name, value in counts.items() if name in self._names}
        return dict(self._shown)


# Counts per minute that reveal nothing about any single request: noise in every count, and no count of few requests.
#
# Each request counts in one cell of one window, and noise is drawn once for each window, so a reader of all windows sees each
# request once. With noise n of probability 2^-|n| / 3 (the two-sided geometric mechanism of Ghosh, Roughgarden and Sundararajan
# 2009) in every cell, the presence of a request at most doubles the probability of any output (differential privacy with
# epsilon = ln 2), and its cell at most quadruples it. This holds even against an observer who knows all other requests.
WINDOW_S: Final = 60
SHOWN_FROM: Final = 50
"""Smallest noisy sum that is published. The noise of six cells reaches 31 once in 1.3 million windows, so a window with fewer
than 20 requests is withheld."""

WINDOWS_THREAT = ThreatProfile(
    row="global profiling",
    threats=frozenset({Requirement.NO_PRIVILEGED_ACCESS}),
    residue="counts of the running minute",
    where=("host memory",),
    attack="an operator who sends all other requests, or compares two readings, learns about a single request",
    mitigations=("counts per minute with noise in each, none of few requests, no sums over time",),
)

Bit = Callable[[], int]
"""Returns 0 or 1, each with probability 1/2."""


def draw_bit() -> int:
    """Returns a random bit of the operating system."""
    return secrets.randbits(1)


def draw_noise(bit: Bit) -> int:
    """Returns a whole number n with probability 2^-|n| / 3, exactly: no floats are involved."""
    return _count_ones(bit) - _count_ones(bit)


def _count_ones(bit: Bit) -> int:
    count = 0
    while bit():
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Window:
    """The published counts of one window.

    Attributes:
        end_s: end of the window, Unix seconds.
        counts: noisy count of each cell, at least 0.
    """

    end_s: int
    counts: tuple[int, ...]


class NoisyWindows:
    """Counts in windows of `WINDOW_S`.

    Args:
        num_cells: number of counts in a window.
    """

    def __init__(self, num_cells: int, bit: Bit = draw_bit) -> None:
        self._num_cells = num_cells
        self._bit = bit
        self._number = 0
        self._counts = [0] * num_cells
        self._shown: Window | None = None

    def count(self, cell: int, now_s: float) -> None:
        """Counts one request; `now_s` in Unix seconds."""
        self._turn(now_s)
        self._counts[cell] += 1

    def last(self, now_s: float) -> Window | None:
        """Returns the last complete window, identical at every reading; None if it had too few requests."""
        self._turn(now_s)
        return self._shown

    def _turn(self, now_s: float) -> None:
        number = int(now_s) // WINDOW_S
        if number == self._number:
            return
        nobody = [0] * self._num_cells  # minutes without requests have noise too
        self._shown = self._close(self._counts if number == self._number + 1 else nobody, number * WINDOW_S)
        self._number, self._counts = number, [0] * self._num_cells

    def _close(self, counts: list[int], end_s: int) -> Window | None:
        noisy = [count + draw_noise(self._bit) for count in counts]
        if sum(noisy) < SHOWN_FROM:
            return None
        return Window(end_s, tuple(max(0, count) for count in noisy))
