"""What metrics may show where the profile allows counts only: `/metrics`, from an allow-list and after a threshold of requests;
a sealed node, counts by the minute with noise. Pure: time and randomness are arguments.
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
    mitigations=("counts only, from an allow-list, shown anew after a threshold of requests",),
)

ALLOWED_COUNTS = frozenset({"requests", "prompt_tokens", "generation_tokens", "steps", "num_preemptions"})
"""Sums over everybody. Cached tokens, times, finish reasons and queue lengths are not among them: each tells of a request."""

THRESHOLD = 20
"""Requests that must end between two publications; each figure then sums over that many at least."""


class CountRelease:
    """Publishes counts so seldom that none can be traced to one request (after k-anonymity, Sweeney 2002).

    What is shown stays as it was until `threshold` more requests have ended: the difference of two readings is never about
    fewer. Who sends `threshold - 1` of them knows the last one's figures, so this keeps an operator out, not a flood.

    Args:
        names: counts that may be shown; everything else stays inside.
        threshold: requests between two publications, at least 2.
    """

    def __init__(self, names: frozenset[str] = ALLOWED_COUNTS, threshold: int = THRESHOLD) -> None:
        if threshold < 2:
            raise ValueError("a threshold of fewer than two requests hides nobody")
        self._names = names
        self._threshold = threshold
        self._num_published = 0
        self._shown: dict[str, float] = {}

    def publish(self, num_ended: int, counts: Mapping[str, float]) -> dict[str, float]:
        """Returns what may be shown now.

        Args:
            num_ended: requests that ended since the server started.
            counts: running totals by name.
        """
        if num_ended - self._num_published >= self._threshold:
            self._num_published = num_ended
            self._shown = {name: value for name, value in counts.items() if name in self._names}
        return dict(self._shown)


# Counts by the minute that tell nothing about any one request: noise in every count, and no count of few.
#
# Each request counts in one cell of one window, and every window gets noise of its own once, so whoever reads all windows for
# ever has seen each request once. With noise n of probability 2^-|n| / 3 (the two-sided geometric mechanism of Ghosh,
# Roughgarden and Sundararajan 2009) in every cell, whether a request was there at most doubles the probability of anything that
# is shown (differential privacy with epsilon = ln 2), and in which cell it was at most quadruples it. No knowledge of all other
# requests helps.

WINDOW_S: Final = 60
SHOWN_FROM: Final = 50
"""Least noisy sum that is shown. The noise of six cells reaches 31 once in 1.3 million windows, so one with fewer than 20
requests is not shown."""

WINDOWS_THREAT = ThreatProfile(
    row="global profiling",
    threats=frozenset({Requirement.NO_PRIVILEGED_ACCESS}),
    residue="counts of the running minute",
    where=("host memory",),
    attack="an operator who sends all other requests, or compares two readings, learns of the one that is not his",
    mitigations=("counts by the minute with noise in each, none of few requests, no sums over time",),
)

Bit = Callable[[], int]
"""Returns 0 or 1, each with probability 1/2."""


def draw_bit() -> int:
    """A bit of the operating system's randomness."""
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
    """What is shown of one window.

    Attributes:
        end_s: Unix seconds at which it ended.
        counts: by cell, with noise, none below 0.
    """

    end_s: int
    counts: tuple[int, ...]


class NoisyWindows:
    """Counts in windows of `WINDOW_S`.

    Args:
        num_cells: how many counts a window has.
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
        """Returns the window before the running one, the same at every reading; None where it had too few requests."""
        self._turn(now_s)
        return self._shown

    def _turn(self, now_s: float) -> None:
        number = int(now_s) // WINDOW_S
        if number == self._number:
            return
        nobody = [0] * self._num_cells  # minutes in which nobody came have noise too
        self._shown = self._close(self._counts if number == self._number + 1 else nobody, number * WINDOW_S)
        self._number, self._counts = number, [0] * self._num_cells

    def _close(self, counts: list[int], end_s: int) -> Window | None:
        noisy = [count + draw_noise(self._bit) for count in counts]
        if sum(noisy) < SHOWN_FROM:
            return None
        return Window(end_s, tuple(max(0, count) for count in noisy))
