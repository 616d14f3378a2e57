"""Shares the rows of one step out among drafts. Pure.

What is made as large as possible is the geometric mean of the sequences' tokens per second (proportional fairness: Kelly,
Maulloo and Tan 1998): a sequence whose drafts are all accepted does not slow down fifteen others for it, as it would if tokens
were only added up. Of a single sequence both are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.scheduler.speculation.draft_times import DraftTimes
from cloister.scheduler.speculation.step_times import AttentionCost, StepTimes, bucket_of

LEAST_RATE: Final = 0.02
"""Drafts that are accepted more seldom are not considered."""
NUM_MARGINAL: Final = 4
"""Rows that the cost of one more is judged by at first: a single time may have been held up."""
STOP_RATIO: Final = 0.85
STOP_ROWS: Final = 32
"""More rows are not considered once so many made the speed so much worse: there is no cheaper tile to come."""


@dataclass(slots=True)
class Proposal:
    """The drafter that promises most for one sequence.

    Attributes:
        rates, proposed: by position, as `AcceptanceRates` has them.
        max_drafts: tokens at most.
        row_s: of attention, for each draft, beyond an average one's.
        draft_price: tokens that the time of one more draft would bring otherwise.
        value: tokens that it brings beyond its cost, as expected before the step's rows are shared out.
        num_drafts: what it is given.
        index: of the sequence in the step.
    """

    drafter: str
    rates: Sequence[float]
    proposed: Sequence[float]
    max_drafts: int
    row_s: float = 0.0
    draft_price: float = 0.0
    value: float = 0.0
    num_drafts: int = 0
    index: int = 0


@dataclass(slots=True)
class Allocation:
    """Finds how many drafts of each proposal make the sequences fastest, all together.

    Attributes:
        num: sequences in the step.
        plain_s: of the step without drafts.
        attention: of the step without drafts.
        draft_times: by drafter.
        draft_row_s: what a draft's row costs in the end, on average.
    """

    num: int
    plain_s: float
    times: StepTimes
    attention: AttentionCost
    draft_times: Mapping[str, DraftTimes]
    draft_row_s: float = 0.0

    def fill(self, proposals: Sequence[Proposal], price: float, num_left: int) -> float:
        """Sets `num_drafts` of each proposal; returns the tokens per second that the step is worth: the geometric mean of what
        each sequence is expected to make, times their number.

        Args:
            price: tokens per second that time is worth.
            num_left: drafts at most.
        """
        candidates = []
        for number, proposal in enumerate(proposals):
            own = price * proposal.row_s + proposal.draft_price
            tokens = 1.0
            for position in range(proposal.max_drafts):
                rate = proposal.rates[position]
                if rate < LEAST_RATE:
                    break
                candidates.append((own - rate / tokens, position, number))
                tokens += proposal.proposed[position] * rate
        candidates.sort()
        num_taken, best = self._cut(candidates[: max(0, num_left)], proposals)
        for _, position, number in candidates[:num_taken]:
            proposals[number].num_drafts = position + 1
        return best

    def _cut(self, candidates: Sequence[tuple[float, int, int]], proposals: Sequence[Proposal]) -> tuple[int, float]:
        """Returns how many of the drafts, best first, make the best speed, and that speed."""
        num, plain_s, last = self.num, self.plain_s, len(candidates)
        self.draft_row_s = max(0.0, self._rows_s(num + NUM_MARGINAL) - plain_s) / NUM_MARGINAL
        best, num_taken = num / plain_s, 0
        rows = worth = attention_s = 0.0
        tokens = [1.0] * len(proposals)
        """Expected of each proposal's sequence so far; `worth` is the sum of their logarithms."""
        idle = 1.0
        """How likely it is that nobody drafts anything."""
        asked: dict[str, list[int]] = {}
        """Drafter -> sequences, drafts, most drafts in a row."""
        bucket = bucket_of(num + 1)
        for count, (_, position, number) in enumerate(candidates, 1):
            proposal = proposals[number]
            proposed = proposal.proposed[position]
            rows += proposed
            more = proposed * proposal.rates[position]
            worth += math.log1p(more / tokens[number])
            tokens[number] += more
            attention_s += proposed * proposal.row_s
            counts = asked.get(proposal.drafter)
            if counts is None:
                counts = asked[proposal.drafter] = [0, 0, 0]
            counts[1] += 1
            if position >= counts[2]:
                counts[2] = position + 1
            if not position:
                counts[0] += 1
                idle *= 1.0 - proposed
            active = 1.0 - idle
            if active <= 0.0:
                continue
            now = num + rows / active
            next_bucket = bucket_of(int(now) + 1)
            if count < last and next_bucket == bucket:
                continue  # one more row costs nothing more
            bucket = next_bucket
            extra_s = active * (self._rows_s(now) - plain_s)
            step_s = plain_s + attention_s + extra_s
            for name, (users, drafts, depth) in asked.items():
                step_s += self.draft_times[name].predict(users, drafts, depth)
            speed = num * math.exp(worth / num) / step_s
            if speed > best:
                best, num_taken, self.draft_row_s = speed, count, max(0.0, extra_s) / rows
            elif speed < STOP_RATIO * best and rows > STOP_ROWS:
                break
        return num_taken, best

    def _rows_s(self, rows: float) -> float:
        """Returns the seconds of a step of so many rows."""
        step_s = self.times.predict(rows, self.attention)
        return step_s if step_s > 0.0 else self.plain_s + self.attention.row_s * (rows - self.num)
