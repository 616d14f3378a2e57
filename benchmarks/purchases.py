"""What the times of purchases tell: how often the request beside a purchase is the buyer's.

    python -m benchmarks.purchases [--days 2] [--seed 1]

Issuer and gateway put together what each sees: purchases by API key, requests by none. For every purchase they guess that the
first request after it, or the last one before it, is the buyer's. Users ask at random, on average once in `--pause` seconds
while they are there, in sittings of half an hour; a guess without looking is right for one in as many as are there. The client
`with a request` buys in the request that finds no more than five tokens left, as ours did until it bought ahead of need.
"""

from __future__ import annotations

import argparse
import bisect
import random
from collections.abc import Iterator
from dataclasses import dataclass

from cloister.client.restocking import PurchasePlan
from cloister.client.token_purchase import BATCH

SITTING_S = 1800.0
BREAK_S = 5400.0
FIRST_S = 30.0
"""From the start of a client, which buys its first batch then, to the first request; a person has to type it."""


@dataclass
class Log:
    """What issuer and gateway see: times, with the user whom only the first of them knows.

    Attributes:
        waited: purchases that a request had to wait for.
    """

    purchases: list[tuple[float, int]]
    requests: list[tuple[float, int]]
    waited: int = 0


def draw_requests(rng: random.Random, until_s: float, pause_s: float) -> Iterator[float]:
    """Yields the times at which a user asks."""
    now = rng.uniform(0, SITTING_S + BREAK_S)
    while now < until_s:
        end = now + rng.expovariate(1 / SITTING_S)
        while now < end:
            yield now
            now += rng.expovariate(1 / pause_s)
        now = end + rng.expovariate(1 / BREAK_S)


def buy_ahead(log: Log, user: int, times: list[float], rng: random.Random) -> None:
    """Our client: a purchase at a moment that is drawn, and with a request only when no token is left."""
    plan, left = PurchasePlan(rng.randrange), BATCH
    log.purchases.append((times[0] - FIRST_S, user))
    before = times[0]
    for now in times:
        wait_s = plan.wait_s(before)
        if wait_s is not None and before + wait_s <= now:  # one at most: another is planned with the next request
            log.purchases.append((before + wait_s, user))
            left += BATCH
            plan.see(left, before + wait_s)
        if not left:
            log.purchases.append((now - 0.01, user))
            log.waited += 1
            plan.run_out()
            left = BATCH
        left -= 1
        plan.see(left, now)
        log.requests.append((now, user))
        before = now


def buy_with_a_request(log: Log, user: int, times: list[float], _: random.Random) -> None:
    """The client before: the request that finds few tokens left buys."""
    left = 0
    for now in times:
        if left <= 5:
            log.purchases.append((now - 0.01, user))
            log.waited += 1
            left += BATCH
        left -= 1
        log.requests.append((now, user))


def guess(log: Log) -> tuple[float, float]:
    """Returns how often the first request after a purchase is the buyer's, and the last one before it."""
    requests = sorted(log.requests)
    times = [time for time, _ in requests]
    after = before = 0
    for time, user in log.purchases:
        index = bisect.bisect(times, time)
        after += index < len(requests) and requests[index][1] == user
        before += index > 0 and requests[index - 1][1] == user
    return after / len(log.purchases), before / len(log.purchases)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=2.0)
    parser.add_argument("--pause", type=float, default=60.0, help="seconds between the requests of one user, on average")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    print("users  there  purchases            first after  last before  purchases that a request waited for")
    for num_users in (4, 20, 100):
        rng = random.Random(chosen.seed)
        asked = [list(draw_requests(rng, chosen.days * 86400, chosen.pause)) for _ in range(num_users)]
        there = num_users * SITTING_S / (SITTING_S + BREAK_S)
        for name, buy in (("with a request", buy_with_a_request), ("ahead, drawn", buy_ahead)):
            log = Log([], [])
            for user, times in enumerate(asked):
                if times:
                    buy(log, user, times, rng)
            after, before = guess(log)
            waited = log.waited / len(log.purchases)
            print(
                f"{num_users:5}  {there:5.0f}  {name:19}  {after:11.1%}  {before:11.1%}  {waited:.1%} of {len(log.purchases):,}"
            )


if __name__ == "__main__":
    main()
