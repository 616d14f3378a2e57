"""How many requests an audit needs to find steering: computed, and tried on drawn numbers with the whole verdict.

`python -m benchmarks.routing_power` tries what is missing in benchmarks/results/routing_power.json, one cell after the other;
`--table` prints the table of docs/routing.md. A cell of the 1% row takes minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cloister.client.routing_audit.hypotheses import HONEST_ABOVE, count_tests, judge
from cloister.client.routing_audit.tails import power, requests_needed
from tests.client.routing_audit.simulation import against, nothing, simulate

RESULT = Path(__file__).parent / "results" / "routing_power.json"
RATES = (0.20, 0.05, 0.01)
CHANCES = (0.50, 0.90, 0.99)
USERS = 4
NODES = 4
CAPTURED = 0.25
TRIALS = 100
VICTIM = "user 1"


def cell_requests(rate: float, chance: float) -> int:
    """Returns the fewest requests of each user by which that part of one user's requests is found with that chance."""
    tests = count_tests(NODES, USERS)
    return requests_needed(users=USERS, rate=rate, captured=CAPTURED, tests=tests, seeds=1, chance=chance, level=HONEST_ABOVE)


def cell_power(rate: float, requests: int) -> float:
    """Returns the computed chance."""
    tests = count_tests(NODES, USERS)
    return power(requests, users=USERS, rate=rate, captured=CAPTURED, tests=tests, level=HONEST_ABOVE)


def try_cell(rate: float, requests: int, trials: int = TRIALS, first: int = 0) -> int:
    """Returns in how many of these trials the verdict was that somebody steers; rate 0 is honest."""
    rule = against(VICTIM, rate) if rate else nothing
    seeds = range(first, first + trials)
    return sum(not judge(simulate(seed, rule, users=USERS, requests=requests)).honest for seed in seeds)


def make_table(found: dict[str, int]) -> str:
    """Returns the table as Markdown."""
    head = "| steered | " + " | ".join(f"found with {chance:.0%}" for chance in CHANCES) + " |"
    rows = [head, "|---|" + "---|" * len(CHANCES)]
    for rate in RATES:
        cells = []
        for chance in CHANCES:
            requests = cell_requests(rate, chance)
            cells.append(f"{requests:,} requests (tried: {found[f'{rate} {requests}']} of {TRIALS})")
        rows.append(f"| {rate:.0%} | " + " | ".join(cells) + " |")
    honest = [f"{name.split()[1]} requests: {count} of {TRIALS}" for name, count in found.items() if name.startswith("0 ")]
    return "\n".join(rows) + "\n\nHonest routing called dishonest, at " + "; ".join(honest) + ".\n"


def main() -> None:
    """Tries what is missing, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    found: dict[str, int] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if given.table:
        print(make_table(found), end="")
        return
    cells = [(rate, cell_requests(rate, chance)) for rate in RATES for chance in CHANCES]
    for rate, requests in [*cells, (0, cell_requests(0.05, 0.99))]:
        name = f"{rate} {requests}"
        if name not in found:
            found[name] = try_cell(rate, requests)
            RESULT.write_text(json.dumps(found, indent=1) + "\n")
            print(name, found[name], f"{cell_power(rate, requests):.3f}" if rate else "", flush=True)


if __name__ == "__main__":
    main()
