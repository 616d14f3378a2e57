"""What a step costs by its number of rows: a table beside the line of `StepCost`. Pure: no clock.

A step's time is far from a line in its rows where speculation lives. A matrix unit works on 16 rows at once, so 5 rows may
cost as much as 16, a 17th a leap, and 4 more than 5, where another kernel takes over. So steps that only decode are learned
row by row; attention, which is a line, is taken off by `StepCost`'s coefficients, and what was never seen lies on a line from
the nearest rows that were.

All times have one level: a machine that becomes busy slows every row, those too that are not being visited.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

LEVEL_SHARE: Final = 0.05
"""How much of a surprise belongs to the level of all times."""
POINT_SHARE: Final = 0.02
"""How much of it belongs to the rows where it was met, once they are well known."""
NUM_UNSURE: Final = 8
"""Visits after which a point is well known."""
LEAST_SHARE: Final = 0.2
"""Of a step's time that rows take, whatever attention is said to take."""

_NARROW, _MIDDLE, _WIDE = 16, 32, 64


def bucket_of(rows: int) -> int:
    """Returns the most rows that are learned together with these: single ones to 16, then 4, 8 and 16 at once."""
    if rows <= _NARROW:
        return rows
    width = 4 if rows <= _MIDDLE else 8 if rows <= _WIDE else 16
    return -(-rows // width) * width


class Curve:
    """Time by rows, as far as it was seen, relative to a level that others keep."""

    __slots__ = ("_counts", "_rows", "_times", "num_visits")

    def __init__(self) -> None:
        self.num_visits = 0
        self._rows: list[int] = []
        self._times: list[float] = []
        self._counts: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def count(self, rows: int) -> int:
        """Returns how often such a step was seen."""
        place = bisect_left(self._rows, bucket_of(rows))
        return self._counts[place] if place < len(self._rows) and self._rows[place] == bucket_of(rows) else 0

    def learn(self, rows: int, value: float, expected: float, weight: float) -> float:
        """Takes in a time; returns by what ratio it surprised, 1 where too little is known to say.

        Args:
            expected: what was predicted for it; 0 if nothing was.
            weight: how far the time is to be trusted, 0 to 1.
        """
        self.num_visits += 1
        key = bucket_of(rows)
        place = bisect_left(self._rows, key)
        if place == len(self._rows) or self._rows[place] != key:
            if expected > 0.0:  # one slow step is no news about the model
                value = min(max(value, 0.4 * expected), 2.5 * expected)
            self._rows.insert(place, key)
            self._times.insert(place, value)
            self._counts.insert(place, 1)
            return 1.0
        num = self._counts[place] = self._counts[place] + 1
        bound = 1.25 if num > NUM_UNSURE else 1.0 + 2.0 / num
        ratio = value / self._times[place]
        ratio = min(max(ratio, 1.0 / bound), bound)
        share = max(POINT_SHARE, 1.0 / num) * weight
        self._times[place] *= 1.0 + share * (ratio - 1.0)
        return 1.0 + weight * (ratio - 1.0) if num > NUM_UNSURE else 1.0

    def nearest(self, rows: float) -> int | None:
        """Returns the rows nearest to these that were seen, if none were on both sides."""
        if bucket_of(int(rows)) < self._rows[0]:
            return self._rows[0]
        return self._rows[-1] if rows > self._rows[-1] else None

    def predict(self, rows: float, slope: float) -> float:
        """Returns the time of so many rows; 0 if nothing was seen.

        Args:
            slope: of the line on which rows lie that are more, or fewer, than any that were seen.
        """
        known, times = self._rows, self._times
        if not known:
            return 0.0
        place = bisect_left(known, rows)
        if place == len(known):
            return times[-1] + slope * (rows - known[-1])
        if place == 0:
            if rows >= known[0] or bucket_of(int(rows)) == known[0]:
                return times[0]
            return max(times[0] - slope * (known[0] - rows), 0.5 * times[0])
        if rows == known[place] or bucket_of(int(rows)) == known[place]:
            return times[place]
        low, high = known[place - 1], known[place]
        return times[place - 1] + (times[place] - times[place - 1]) * (rows - low) / (high - low)


class StepTimes:
    """Time of a decode step by its rows, attention aside: plain ones, and those that verify drafts."""

    def __init__(self) -> None:
        self.plain = Curve()
        self.drafting = Curve()
        self._level = 1.0

    def learn(self, rows: int, attention_s: float, elapsed_s: float, slope: float, *, is_drafting: bool) -> None:
        """Takes in one measured step; one that took no time says nothing."""
        if elapsed_s <= 0.0:
            return
        own_s = max(elapsed_s - attention_s, LEAST_SHARE * elapsed_s)
        curve = self.drafting if is_drafting else self.plain
        expected_s = self.drafting_s(rows, slope) if is_drafting else self.plain_s(rows, slope)
        surprise = curve.learn(rows, own_s / self._level, expected_s / self._level, own_s / elapsed_s)
        self._level *= 1.0 + LEVEL_SHARE * (surprise - 1.0)

    def plain_s(self, rows: float, slope: float) -> float:
        """Returns the seconds of a step without drafts; 0 if nothing was learned."""
        return self._level * self.plain.predict(rows, slope / self._level)

    def drafting_s(self, rows: float, slope: float) -> float:
        """Returns the seconds of a step that verifies drafts, those among its rows; 0 if nothing was learned."""
        level, curve = self._level, self.drafting
        slope /= level
        if not curve:
            return level * self.plain.predict(rows, slope)
        end = curve.nearest(rows)
        if end is None or not self.plain:
            return level * curve.predict(rows, slope)
        # Beyond what was seen, rows cost what they cost without drafts, and drafting as much more as at the last ones seen.
        extra = curve.predict(end, slope) - self.plain.predict(end, slope)
        return level * (self.plain.predict(rows, slope) + extra)
