"""Seconds of a decode step by its number of rows, beside the linear `StepCost`. Pure: no clock.

A step's time is far from linear in its rows where speculation matters. A matrix unit works on 16 rows at once, so 5 rows may
cost as much as 16, a 17th adds a jump, and 4 may cost more than 5 if another kernel takes over. So the times of steps that only
decode are measured by rows, each with its attention. `StepCost` gives the cost of more or less attention, and of rows beyond
those measured.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from cloister.scheduler.step_cost import StepCost, StepSize

MIN_WEIGHT: Final = 0.03
"""Weight of a new time in the mean of a bucket with many measurements: about 30 steps are remembered."""
NUM_SURE: Final = 64
STRIDE: Final = 4
"""After this many measurements of a bucket only every n-th step is recorded, because learning costs CPU time."""
FIRST_RATIO: Final = 2.5
"""Largest ratio between the first time of a bucket and its prediction."""
NUM_FIRST: Final = 4
"""The shortest of this many first times is used: other programs only slow steps down."""
UP: Final = 1.1
"""Largest ratio of any further time."""
MIN_RATIO: Final = 0.25
"""Lower limit of the factor by which less attention reduces a time."""

_WIDTHS = ((16, 1), (32, 2), (64, 4), (1 << 30, 8))


def bucket_of(rows: int) -> int:
    """Returns the upper bound of the bucket for this number of rows: width 1 up to 16, then 2, 4 and 8."""
    for most, width in _WIDTHS:
        if rows <= most:
            return -(-rows // width) * width
    raise ValueError(f"{rows} rows")


@dataclass(slots=True)
class Point:
    """One bucket of row counts.

    Attributes:
        time_s: seconds of a step with the bucket's largest number of rows, with this attention.
        attended, read: as in `StepSize`.
    """

    time_s: float
    attended: float
    read: float
    num_times: int = 1


class AttentionCost:
    """The current cost of attention.

    Attributes:
        attended, read: of the step to predict, without drafts.
        row_s: seconds of a row, as a fallback.
        key_s, read_s: seconds of a key attended, and of a key read.
        context: keys that one more draft attends to.
    """

    __slots__ = ("attended", "context", "key_s", "num", "read", "read_s", "row_s")

    def __init__(self, cost: StepCost, size: StepSize) -> None:
        _, self.row_s, self.key_s, self.read_s = cost.coefficients
        self.num, self.attended, self.read = size
        self.context = self.attended / self.num if self.num else 0.0

    def move(self, point: Point, rows: float) -> float:
        """Returns a bucket's time, adjusted to the attention of a step with this many rows."""
        more = rows - self.num
        attended, read = self.attended + more * self.context - point.attended, self.read + more - point.read
        return max(point.time_s + self.key_s * attended + self.read_s * read, MIN_RATIO * point.time_s)


class StepTimes:
    """Measured seconds of decode steps by rows.

    Args:
        plain: the same for steps without drafts; predicts rows that were not measured with drafts.
    """

    def __init__(self, plain: StepTimes | None = None) -> None:
        self._plain = plain
        self._rows: list[int] = []
        self._points: list[Point] = []
        self._num_steps = 0

    @property
    def max_rows(self) -> int:
        """Rows of the largest step that was measured; 0 if none was."""
        return self._rows[-1] if self._rows else 0

    def is_known(self, rows: int) -> bool:
        """True if a step with this many rows was measured."""
        return self._find(rows) is not None

    def _find(self, rows: int) -> Point | None:
        key = bucket_of(rows)
        place = bisect_left(self._rows, key)
        return self._points[place] if place < len(self._rows) and self._rows[place] == key else None

    def learn(self, size: StepSize, elapsed_s: float, cost: StepCost) -> None:
        """Records one measured step; steps of zero time are ignored."""
        if elapsed_s <= 0.0:
            return
        self._num_steps += 1
        rows = int(size.num_tokens)
        point = self._find(rows)
        if point is not None and point.num_times > NUM_SURE and self._num_steps % STRIDE:
            return
        attention, key = AttentionCost(cost, size), bucket_of(rows)
        elapsed_s += attention.row_s * (key - rows)
        if point is None:
            expected_s = self.predict(rows, attention)
            if expected_s > 0.0:
                elapsed_s = min(max(elapsed_s, expected_s / FIRST_RATIO), expected_s * FIRST_RATIO)
            place = bisect_left(self._rows, key)
            self._rows.insert(place, key)
            self._points.insert(place, Point(elapsed_s, attention.attended, attention.read))
            return
        point.num_times += 1
        moved_s = attention.move(point, rows)
        ratio = min(elapsed_s / moved_s, UP)
        is_shortest = ratio < 1.0 and point.num_times <= NUM_FIRST
        weight = 1.0 if is_shortest else max(MIN_WEIGHT, 1.0 / point.num_times)
        point.time_s = (point.time_s + weight * (moved_s - point.time_s)) * (1.0 + weight * (ratio - 1.0))
        point.attended += weight * (attention.attended - point.attended)
        point.read += weight * (attention.read - point.read)

    def lower(self, share: float) -> None:
        """Lowers estimates with few measurements, which may all be outliers."""
        for point in self._points:
            if point.num_times < NUM_FIRST:
                point.time_s *= share

    def predict(self, rows: float, attention: AttentionCost) -> float:
        """Returns the predicted seconds of a step with this many rows, including drafts; 0 if nothing was measured."""
        known, plain = self._rows, self._plain
        if plain is None or not plain.max_rows:
            return self._interpolate(rows, attention)
        if not known:
            return plain.predict(rows, attention)
        time_s = self._interpolate(rows, attention)
        end = max(known[0], min(known[-1], rows))
        if end == rows:
            return time_s
        # Beyond the measured rows, use the cost without drafts plus the extra cost of drafts at the largest measured rows.
        extra_s = self._interpolate(end, attention) - plain.predict(end, attention)
        return max(plain.predict(rows, attention) + extra_s, 0.5 * time_s)

    def _interpolate(self, rows: float, attention: AttentionCost) -> float:
        """Interpolates the seconds of this many rows from measurements; 0 if there are none."""
        known, points = self._rows, self._points
        if not known:
            return 0.0
        place = bisect_left(known, rows)
        if place == len(known):
            return attention.move(points[-1], rows) + attention.row_s * (rows - known[-1])
        time_s = attention.move(points[place], rows)
        high = known[place]
        if rows == high:
            return time_s
        if place == 0:
            return max(time_s - attention.row_s * (high - rows), 0.5 * time_s)
        before_s, low = attention.move(points[place - 1], rows), known[place - 1]
        return before_s + (time_s - before_s) * (rows - low) / (high - low)
