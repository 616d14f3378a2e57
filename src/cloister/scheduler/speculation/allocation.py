"""Shares the rows of one step out among drafts. Pure.

What is made as large as possible is the geometric mean of the sequences' tokens per second (proportional fairness: Kelly,
Maulloo and Tan 1998): a sequence whose drafts are all accepted does not slow down fifteen others for it, as it would if tokens
were only added up. Of a single sequence both are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from cloister.scheduler.speculation.draft_times import DraftTimes
from cloister.scheduler.speculation.step_times import AttentionCost, StepTimes, bucket_of

LEAST_GAIN: Final = 0.02
"""Drafts that are accepted more seldom are not considered."""
HOPELESS: Final = 0.85
NUM_HOPEFUL: Final = 32
"""More rows are not considered once so many made the ratio so much worse."""
NUM_MARGINAL: Final = 4
"""Rows that the cost of one more is judged by."""


class Bid:
    """What a drafter offers for one sequence.

    Attributes:
        gains: by place, falling: how often a draft there is accepted.
        found: by place: how often it is made when it is asked for.
        room: drafts at most.
        row_s: of attention, for each draft, beyond an average one's.
        draft_price: tokens that the time of one more draft would bring otherwise.
        value: tokens that it brings beyond its cost, as expected before the step's rows are shared out.
        num_drafts: what it is given.
        place: of the sequence in the step.
    """

    __slots__ = ("draft_price", "drafter", "found", "gains", "num_drafts", "place", "room", "row_s", "value")

    def __init__(
        self,
        drafter: str,
        gains: Sequence[float],
        found: Sequence[float],
        room: int,
        row_s: float,
        draft_price: float,
        value: float,
    ) -> None:
        self.drafter = drafter
        self.gains = gains
        self.found = found
        self.room = room
        self.row_s = row_s
        self.draft_price = draft_price
        self.value = value
        self.num_drafts = 0
        self.place = 0


class Allocation:
    """Finds how many drafts of each bid make the sequences fastest, all together.

    Args:
        num: sequences in the step.
        plain_s: of the step without drafts.
        attention: of the step without drafts.
        draft_times: by drafter.

    Attributes:
        row_s: what a draft's row costs in the end, on average.
    """

    def __init__(
        self,
        num: int,
        plain_s: float,
        times: StepTimes,
        attention: AttentionCost,
        draft_times: Mapping[str, DraftTimes],
    ) -> None:
        self._num = num
        self._plain_s = plain_s
        self._times = times
        self._attention = attention
        self._draft_times = draft_times
        self.row_s = max(0.0, self._rows_s(num + NUM_MARGINAL) - plain_s) / NUM_MARGINAL

    def fill(self, bids: Sequence[Bid], price: float, num_left: int) -> float:
        """Sets `num_drafts` of each bid; returns the tokens per second that the step is worth: the geometric mean of what each
        sequence is expected to make, times their number.

        Args:
            price: tokens per second that time is worth.
            num_left: drafts at most.
        """
        line = []
        for number, bid in enumerate(bids):
            own = price * bid.row_s + bid.draft_price
            gains, found = bid.gains, bid.found
            tokens = 1.0
            for place in range(bid.room):
                gain = gains[place]
                if gain < LEAST_GAIN:
                    break
                line.append((own - gain / tokens, place, number))
                tokens += found[place] * gain
        line.sort()
        cut, best = self._cut(line, bids, num_left)
        for _, place, number in line[:cut]:
            bids[number].num_drafts = place + 1
        return best

    def _cut(self, line: Sequence[tuple[float, int, int]], bids: Sequence[Bid], num_left: int) -> tuple[int, float]:
        """Returns how much of the line makes the best ratio of tokens and time, and that ratio."""
        num, plain_s = self._num, self._plain_s
        best, cut = num / plain_s, 0
        rows = worth = attention_s = 0.0
        tokens = [1.0] * len(bids)
        """Expected of each bid's sequence so far; `worth` is the sum of their logarithms."""
        idle = 1.0
        """How likely it is that nobody drafts anything."""
        asked: dict[str, list[int]] = {}
        last = min(len(line), num_left)
        bucket = bucket_of(num + 1)
        for index in range(last):
            _, place, number = line[index]
            bid = bids[number]
            found = bid.found[place]
            rows += found
            more = found * bid.gains[place]
            worth += math.log1p(more / tokens[number])
            tokens[number] += more
            attention_s += found * bid.row_s
            counts = asked.get(bid.drafter)
            if counts is None:
                counts = asked[bid.drafter] = [0, 0, 0]
            counts[1] += 1
            if place >= counts[2]:
                counts[2] = place + 1
            if not place:
                counts[0] += 1
                idle *= 1.0 - found
            active = 1.0 - idle
            if active <= 0.0:
                continue
            now = num + rows / active
            if index + 1 < last and bucket_of(int(now) + 1) == bucket:
                continue  # one more row costs nothing more
            bucket = bucket_of(int(now) + 1)
            extra_s = active * (self._rows_s(now) - plain_s)
            step_s = plain_s + attention_s + extra_s
            for name, (users, drafts, depth) in asked.items():
                step_s += self._draft_times[name].predict(users, drafts, depth)
            ratio = num * math.exp(worth / num) / step_s
            if ratio > best:
                best, cut, self.row_s = ratio, index + 1, max(0.0, extra_s) / rows
            elif ratio < HOPELESS * best and rows > NUM_HOPEFUL:
                break
        return cut, best

    def _rows_s(self, rows: float) -> float:
        """Returns the seconds of a step with drafts."""
        step_s = self._times.drafting_s(rows, self._attention)
        return step_s if step_s > 0.0 else self._plain_s + self._attention.slope * (rows - self._num)
