"""What a decode step costs by its number of rows: a table beside the line of `StepCost`. Pure: no clock.

A step's time is far from a line in its rows where speculation lives. A matrix unit works on 16 rows at once, so 5 rows may
cost as much as 16, a 17th a leap, and 4 more than 5, where another kernel takes over. So steps that only decode are learned
row by row, each with the attention that it had; `StepCost` says what more or less attention costs, and what rows cost beyond
those that were seen.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from cloister.scheduler.budget import StepCost, StepSize

POINT_SHARE: Final = 0.03
"""How much of a surprise is believed, where rows are well known."""
NUM_UNSURE: Final = 8
"""Visits after which a point is well known."""
NUM_SURE: Final = 64
STRIDE: Final = 4
"""After so many visits only every so many steps are taken in."""
FORGOTTEN: Final = 512
STALE_SHARE: Final = 0.25
"""After so many steps without a visit the next one counts this much."""
FIRST_BOUND: Final = 2.5
"""By what ratio a first visit may surprise."""
NUM_FIRST: Final = 4
UP_FIRST: Final = 1.3
"""Of so many visits the shortest is believed, or a little more."""
DOWN: Final = 0.67
UP: Final = 1.1
"""By what ratio a later one may surprise."""
MOST_RATIO: Final = 4.0
"""By what ratio more or less attention may change a time."""

_WIDTHS = ((16, 1), (32, 2), (64, 4))
_WIDEST = 8


def bucket_of(rows: int) -> int:
    """Returns the most rows that are learned together with these: single ones to 16, then 2, 4 and 8 at once."""
    for most, width in _WIDTHS:
        if rows <= most:
            return -(-rows // width) * width
    return -(-rows // _WIDEST) * _WIDEST


class _Point:
    """One bucket.

    Attributes:
        time_s: of a step of the bucket's most rows, with this attention.
        attended, read: as in `StepSize`.
        num_visits, last: how often it was seen, and in which step at last.
    """

    __slots__ = ("attended", "last", "num_visits", "read", "time_s")

    def __init__(self, time_s: float, attended: float, read: float, now: int) -> None:
        self.time_s = time_s
        self.attended = attended
        self.read = read
        self.num_visits = 1
        self.last = now


class AttentionCost:
    """What attention costs now.

    Attributes:
        attended, read: of the step that is asked about, without drafts.
        slope: seconds of a row, where nothing better is known.
        key_s, read_s: seconds of a key attended, and of a key read.
        context: keys that one draft more attends to.
    """

    __slots__ = ("attended", "context", "key_s", "num", "read", "read_s", "slope")

    def __init__(self, cost: StepCost, size: StepSize) -> None:
        _, self.slope, self.key_s, self.read_s = cost.coefficients
        self.num, self.attended, self.read = size
        self.context = self.attended / self.num if self.num else 0.0

    def move(self, point: _Point, rows: float) -> float:
        """Returns a point's time with the attention of a step of so many rows."""
        more = rows - self.num
        time_s = point.time_s
        time_s += self.key_s * (self.attended + more * self.context - point.attended)
        time_s += self.read_s * (self.read + more - point.read)
        return min(max(time_s, point.time_s / MOST_RATIO), point.time_s * MOST_RATIO)


class Curve:
    """Time by rows, as far as it was seen."""

    __slots__ = ("_points", "_rows", "num_visits")

    def __init__(self) -> None:
        self.num_visits = 0
        self._rows: list[int] = []
        self._points: list[_Point] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def most_rows(self) -> int:
        """Rows of the largest step that was seen; 0 if none was."""
        return self._rows[-1] if self._rows else 0

    def count(self, rows: int) -> int:
        """Returns how often such a step was seen."""
        key = bucket_of(rows)
        place = bisect_left(self._rows, key)
        return self._points[place].num_visits if place < len(self._rows) and self._rows[place] == key else 0

    def learn(self, rows: int, elapsed_s: float, attention: AttentionCost, expected_s: float, now: int) -> None:
        """Takes in the time of a step.

        Args:
            attention: of that step, drafts included.
            expected_s: what was predicted for it; 0 if nothing was.
            now: number of the step.
        """
        self.num_visits += 1
        key = bucket_of(rows)
        elapsed_s += attention.slope * (key - rows)
        place = bisect_left(self._rows, key)
        if place == len(self._rows) or self._rows[place] != key:
            if expected_s > 0.0:
                elapsed_s = min(max(elapsed_s, expected_s / FIRST_BOUND), expected_s * FIRST_BOUND)
            self._rows.insert(place, key)
            self._points.insert(place, _Point(elapsed_s, attention.attended, attention.read, now))
            return
        point = self._points[place]
        point.num_visits = num = point.num_visits + 1
        gap, point.last = now - point.last, now
        ratio = elapsed_s / attention.move(point, rows)
        # Other programs hold steps up and hurry none: what is shorter than known is believed sooner than what is longer.
        if num <= NUM_FIRST:
            ratio = max(ratio, 1.0 / MOST_RATIO**2) if ratio < 1.0 else min(ratio, UP_FIRST)
            share = 1.0 if ratio < 1.0 else 1.0 / num
        else:
            ratio = min(max(ratio, DOWN), UP)
            share = max(POINT_SHARE, 1.0 / num, min(gap / FORGOTTEN, STALE_SHARE))
        moved_s = attention.move(point, rows)
        point.time_s = (point.time_s + share * (moved_s - point.time_s)) * (1.0 + share * (ratio - 1.0))
        point.attended += share * (attention.attended - point.attended)
        point.read += share * (attention.read - point.read)

    def doubt(self, share: float) -> None:
        """Believes less of what was seen only a few times, and may have been held up each time."""
        for point in self._points:
            if point.num_visits < NUM_FIRST:
                point.time_s *= share

    def nearest(self, rows: float) -> int | None:
        """Returns the rows nearest to these that were seen, if none were on both sides."""
        if rows < self._rows[0]:
            return self._rows[0]
        return self._rows[-1] if rows > self._rows[-1] else None

    def predict(self, rows: float, attention: AttentionCost) -> float:
        """Returns the time of so many rows; 0 if nothing was seen."""
        known, points = self._rows, self._points
        if not known:
            return 0.0
        place = bisect_left(known, rows)
        if place == len(known):
            return attention.move(points[-1], rows) + attention.slope * (rows - known[-1])
        time_s = attention.move(points[place], rows)
        high = known[place]
        if rows == high:
            return time_s
        if place == 0:
            return max(time_s - attention.slope * (high - rows), 0.5 * time_s)
        before_s, low = attention.move(points[place - 1], rows), known[place - 1]
        return before_s + (time_s - before_s) * (rows - low) / (high - low)


class StepTimes:
    """Time of a decode step by its rows: plain ones, and those that verify drafts."""

    def __init__(self) -> None:
        self.plain = Curve()
        self.drafting = Curve()
        self._num_steps = 0

    @property
    def most_rows(self) -> int:
        """Rows of the largest step that was seen; 0 if none was."""
        return max(self.plain.most_rows, self.drafting.most_rows)

    def learn(self, size: StepSize, elapsed_s: float, cost: StepCost, *, is_drafting: bool) -> None:
        """Takes in one measured step; one that took no time says nothing."""
        if elapsed_s <= 0.0:
            return
        self._num_steps += 1
        rows = int(size.num_tokens)
        curve = self.drafting if is_drafting else self.plain
        count = curve.count(rows)
        if count > NUM_SURE and self._num_steps % STRIDE:
            return
        attention = AttentionCost(cost, size)
        expected_s = 0.0
        if not count:
            expected_s = self.drafting_s(rows, attention) if is_drafting else curve.predict(rows, attention)
        curve.learn(rows, elapsed_s, attention, expected_s, self._num_steps)

    def plain_s(self, rows: float, attention: AttentionCost) -> float:
        """Returns the seconds of a step without drafts; 0 if nothing was learned."""
        return self.plain.predict(rows, attention)

    def drafting_s(self, rows: float, attention: AttentionCost) -> float:
        """Returns the seconds of a step that verifies drafts, those among its rows; 0 if nothing was learned."""
        curve, plain = self.drafting, self.plain
        end = curve.nearest(rows) if curve else None
        if not curve or not plain:
            return (curve or plain).predict(rows, attention)
        time_s = curve.predict(rows, attention)
        if end is None:
            return time_s
        # Beyond what was seen, rows cost what they cost without drafts, and drafting as much more as at the last ones seen.
        extra_s = curve.predict(end, attention) - plain.predict(end, attention)
        return max(plain.predict(rows, attention) + extra_s, 0.5 * time_s)
