"""How many requests a trial needs: a power computation, so that the number is reasoned and not tried out. Pure.

A gateway that withholds or misdelivers a part `rate` of one user's requests for nodes that are not captured makes about
n * rate * (1 - t) losses among that user's n first draws, and no others. With u users who ask alike, k such losses have
p = u ** -k. With m tests Holm asks for p * m < 1e-6 at worst, so k >= log(m / 1e-6) / log(u). The number of losses is
binomial; n is the smallest for which it reaches k with the probability that all seeds together need.
"""

from __future__ import annotations

import math

from cloister.client.routing.tails import binomial, upper_tail

DETECTED_BELOW = 1e-6


def losses_needed(users: int, tests: int, level: float = DETECTED_BELOW) -> int:
    """Returns how many losses of one user alone suffice for a Holm-corrected p below `level`."""
    return math.ceil(math.log(tests / level) / math.log(users))


def power(requests: int, *, users: int, rate: float, captured: float, tests: int, level: float = DETECTED_BELOW) -> float:
    """Returns the probability that one trial finds the attack.

    Args:
        requests: of the attacked user; the others send as many.
        rate: part of that user's requests that is interfered with, if they are not for a captured node.
        captured: share of the capacity that is captured.
        tests: hypotheses that are corrected for.
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
    """Returns the fewest requests per user for which all of `seeds` trials find the attack with probability `chance`."""
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
