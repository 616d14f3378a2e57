"""Shares the rows of one step out among drafts. Pure.

The objective is the geometric mean of the sequences' tokens per second (proportional fairness: Kelly, Maulloo and Tan 1998): a
sequence whose drafts are all accepted does not slow down fifteen others, as it would if the sum of tokens were maximised. For a
single sequence both are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.scheduler.speculation.draft_times import DraftTimes
from cloister.scheduler.speculation.step_times import AttentionCost, StepTimes, bucket_of

MIN_RATE: Final = 0.02
"""Minimum acceptance rate of drafts that are considered."""
NUM_MARGINAL: Final = 4
"""Number of rows over which the marginal cost is first averaged: a single time may be an outlier."""
STOP_RATIO: Final = 0.85
STOP_ROWS: Final = 32
"""The search stops once this many rows have lowered the speed by this ratio: no cheaper tile follows."""


@dataclass(slots=True)
class Proposal:
    """The most promising drafter for one sequence.

    Attributes:
        rates, proposed: by position, as in `AcceptanceRates`.
        max_drafts: maximum number of tokens.
        row_s: seconds of attention for each draft, above the average.
        draft_price: tokens that the time of one more draft would otherwise yield.
        value: expected tokens minus cost, before the step's rows are allocated.
        num_drafts: number of drafts allocated.
        index: index of the sequence in the step.
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
    """Finds the number of drafts of each proposal that maximises the objective.

    Attributes:
        num: number of sequences in the step.
        plain_s: seconds of the step without drafts.
        attention: of the step without drafts.
        draft_times: by drafter.
        draft_row_s: average cost of a draft's row in the result.
    """

    num: int
    plain_s: float
    times: StepTimes
    attention: AttentionCost
    draft_times: Mapping[str, DraftTimes]
    draft_row_s: float = 0.0

    def fill(self, proposals: Sequence[Proposal], price: float, num_left: int) -> float:
        """Sets `num_drafts` of each proposal. Returns the value of the step in tokens per second: the geometric mean of the
        sequences' expected speeds, times their number.

        Args:
            price: value of time, in tokens per second.
            num_left: maximum number of drafts.
        """
        candidates = []
        for number, proposal in enumerate(proposals):
            own = price * proposal.row_s + proposal.draft_price
            tokens = 1.0
            for position in range(proposal.max_drafts):
                rate = proposal.rates[position]
                if rate < MIN_RATE:
                    break
                candidates.append((own - rate / tokens, position, number))
                tokens += proposal.proposed[position] * rate
        candidates.sort()
        num_taken, best = self._cut(candidates[: max(0, num_left)], proposals)
        for _, position, number in candidates[:num_taken]:
            proposals[number].num_drafts = position + 1
        return best

    def _cut(self, candidates: Sequence[tuple[float, int, int]], proposals: Sequence[Proposal]) -> tuple[int, float]:
        """Returns how many of the drafts, best first, give the highest speed, and that speed."""
        num, plain_s, last = self.num, self.plain_s, len(candidates)
        self.draft_row_s = max(0.0, self._rows_s(num + NUM_MARGINAL) - plain_s) / NUM_MARGINAL
        best, num_taken = num / plain_s, 0
        rows = worth = attention_s = 0.0
        tokens = [1.0] * len(proposals)
        """Expected tokens of each proposal's sequence so far; `worth` is the sum of their logarithms."""
        idle = 1.0
        """Probability that no sequence drafts anything."""
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
        """Returns the seconds of a step with this many rows."""
        step_s = self.times.predict(rows, self.attention)
        return step_s if step_s > 0.0 else self.plain_s + self.attention.row_s * (rows - self.num)
