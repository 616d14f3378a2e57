"""Does one user wait longer than the others? The rank-sum test of Mann and Whitney (1947), corrected for ties. Pure.

Requests were sent in random order, so without interference every order of their times is as likely as any other, whatever load
there was and whatever the times are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cloister.client.routing.hypotheses import HypothesisResult

LEAST_TIMES = 20
"""Of each side: below, the normal approximation of the rank sum is not good enough to accuse anybody."""


def compare_times(times: Sequence[tuple[str, float]]) -> Iterator[HypothesisResult]:
    """Yields for each user whether the times of its requests rank above or below those of all others.

    Args:
        times: user and seconds of each request; infinite for one that took too long.
    """
    for user in sorted({user for user, _ in times}):
        own = [seconds for who, seconds in times if who == user]
        others = [seconds for who, seconds in times if who != user]
        if min(len(own), len(others)) >= LEAST_TIMES:
            observed, expected, p_value = rank_sum(own, others)
            yield HypothesisResult("timing", user, (), p_value, observed, expected, len(own))


def rank_sum(own: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Returns the sum of the ranks of `own` among all, what it is on average, and the two-sided p-value."""
    ranks = _rank([*own, *others])
    n, m = len(own), len(others)
    total = n + m
    observed = sum(ranks[: len(own)])
    expected = n * (total + 1) / 2.0
    ties = sum(count**3 - count for count in Counter([*own, *others]).values())
    variance = n * m / 12.0 * (total + 1 - ties / (total * (total - 1.0)))
    if variance <= 0.0:
        return observed, expected, 1.0
    z = max(abs(observed - expected) - 0.5, 0.0) / math.sqrt(variance)
    return observed, expected, math.erfc(z / math.sqrt(2.0))


def _rank(values: Iterable[float]) -> list[float]:
    """Returns ranks from 1; equal values share the mean of theirs."""
    given = list(values)
    order = sorted(range(len(given)), key=given.__getitem__)
    ranks = [0.0] * len(given)
    at = 0
    while at < len(order):
        end = at
        while end < len(order) and given[order[end]] == given[order[at]]:
            end += 1
        for index in order[at:end]:
            ranks[index] = (at + 1 + end) / 2.0
        at = end
    return ranks
