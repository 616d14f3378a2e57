"""Exact probabilities of counts, tails for p-values, and the number of requests that a trial needs. Pure.

Distributions are arrays: element k is the probability of the count k. Sums of independent counts are convolutions of
positive terms, so that tails far below 1e-16 keep their relative precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float64]

_log_factorials: Probabilities = np.zeros(1)


def log_factorials(n: int) -> Probabilities:
    """Returns log(k!) for k = 0..n, from `math.lgamma`."""
    global _log_factorials
    if len(_log_factorials) <= n:
        _log_factorials = np.array([math.lgamma(k + 1.0) for k in range(2 * n + 1)])
    return _log_factorials[: n + 1]


def binomial(n: int, p: float) -> Probabilities:
    """Returns the binomial distribution of `n` trials of probability `p`: [n + 1]."""
    if p <= 0.0 or p >= 1.0:
        certain = np.zeros(n + 1)
        certain[0 if p <= 0.0 else n] = 1.0
        return certain
    k = np.arange(n + 1)
    logs = log_factorials(n)
    chances: Probabilities = np.exp(logs[n] - logs[k] - logs[n - k] + k * math.log(p) + (n - k) * math.log1p(-p))
    return chances


def hypergeometric(total: int, marked: int, taken: int) -> Probabilities:
    """Returns the hypergeometric distribution: how many of `marked` among `total` are in a sample of `taken`: [taken + 1]."""
    logs = log_factorials(total)
    k = np.arange(taken + 1)
    possible = (k <= marked) & (taken - k <= total - marked)
    k = k[possible]
    out = np.zeros(taken + 1)
    ways = logs[marked] - logs[k] - logs[marked - k]
    ways += logs[total - marked] - logs[taken - k] - logs[total - marked - taken + k]
    out[possible] = np.exp(ways - (logs[total] - logs[taken] - logs[total - taken]))
    return out


def add(parts: Iterable[Probabilities]) -> Probabilities:
    """Returns the distribution of the sum of independent counts."""
    total: Probabilities = np.ones(1)
    for part in parts:
        total = np.convolve(total, part)
    return total


def upper_tail(distribution: Probabilities, k: int) -> float:
    """Returns P(count >= k)."""
    return min(1.0, float(distribution[max(k, 0) :].sum()))


def lower_tail(distribution: Probabilities, k: int) -> float:
    """Returns P(count <= k)."""
    return min(1.0, float(distribution[: k + 1].sum()))


def two_sided(distribution: Probabilities, k: int) -> float:
    """Returns a two-sided p-value: twice the smaller tail, at most 1. Exact tests of this kind are conservative."""
    return min(1.0, 2.0 * min(lower_tail(distribution, k), upper_tail(distribution, k)))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Returns P(chi-square with `degrees` degrees of freedom >= `statistic`): Q(degrees/2, statistic/2).

    The regularised upper incomplete gamma function of half whole numbers is a finite sum (DLMF 8.4.8, 8.4.14), all of it
    positive.
    """
    if degrees < 1:
        return 1.0
    x = statistic / 2.0
    if x <= 0.0:
        return 1.0
    if degrees % 2:
        total, power = math.erfc(math.sqrt(x)), 0.5
    else:
        total, power = math.exp(-x), 1.0
    while power < degrees / 2.0:
        total += math.exp(power * math.log(x) - x - math.lgamma(power + 1.0))
        power += 1.0
    return min(1.0, total)


def holm(p_values: Iterable[float]) -> list[float]:
    """Returns p-values corrected for their number by Holm's step-down method (1979), in the order given."""
    given = list(p_values)
    order = sorted(range(len(given)), key=given.__getitem__)
    corrected, least = [0.0] * len(given), 0.0
    for rank, index in enumerate(order):
        least = max(least, min(1.0, given[index] * (len(given) - rank)))
        corrected[index] = least
    return corrected


DETECTED_BELOW = 1e-6


def losses_needed(users: int, tests: int, level: float = DETECTED_BELOW) -> int:
    """Returns how many losses of a single user suffice for a Holm-corrected p below `level`."""
    return math.ceil(math.log(tests / level) / math.log(users))


def power(requests: int, *, users: int, rate: float, captured: float, tests: int, level: float = DETECTED_BELOW) -> float:
    """Returns the probability that one trial detects the attack.

    Args:
        requests: number of requests of the attacked user; the others send as many.
        rate: fraction of that user's requests to nodes that are not captured with which the attacker interferes.
        captured: captured share of the capacity.
        tests: number of hypotheses to correct for.
    """
    return upper_tail(binomial(requests, rate * (1.0 - captured)), losses_needed(users, tests, level))


def requests_needed(
    *,
    users: int,
    rate: float,
    captured: float,
    tests: int,
    seeds: int = 20,
    chance: float = 0.99,
    level: float = DETECTED_BELOW,
) -> int:
    """Returns the minimum number of requests per user with which all of `seeds` trials detect the attack with probability
    `chance`."""
    wanted = chance ** (1.0 / seeds)
    most = 1
    while power(most, users=users, rate=rate, captured=captured, tests=tests, level=level) < wanted:
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        enough = power(middle, users=users, rate=rate, captured=captured, tests=tests, level=level) >= wanted
        least, most = (least, middle) if enough else (middle, most)
    return most
