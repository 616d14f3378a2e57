"""Is routing shown to be honest when it is, and found out when it is not? `cloister verify routing` over many seeds.

`python -m benchmarks.routing [--seeds 20] [--attacks none,steer,drop]` writes benchmarks/results/routing.json after each
trial, and goes on where it stopped. 6 users x 680 requests by default; at about 10 ms each a trial takes a minute on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from cloister.client.routing_audit.adversary import make_adversary
from cloister.client.routing_audit.hypotheses import judge
from cloister.client.routing_audit.records import Attack
from cloister.client.routing_audit.tails import power, requests_needed
from cloister.client.routing_audit.trial import CAPTURED, PLAN, Size, run_trial

RESULT = Path(__file__).parent / "results" / "routing.json"
RATE = 0.05
VICTIM = "user-3"


def run_one(attack: Attack, seed: int, size: Size) -> dict[str, Any]:
    """Runs one trial and returns what it showed."""
    begun = time.monotonic()
    book = make_adversary(attack, rate=RATE, captured=CAPTURED, victim=VICTIM, seed=seed)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        log = asyncio.run(run_trial(Path(directory), size, seed=seed, make_book=book))
    verdict = judge(log)
    worst, _ = verdict.worst[0]
    settings: Any = {"users": size.users, "rate": RATE, "captured": PLAN[0].share((CAPTURED,)), "tests": verdict.tests}
    return {
        "attack": str(attack),
        "seed": seed,
        "users": size.users,
        "requests": size.requests,
        "power": power(size.requests, **settings),
        "requests_needed": requests_needed(**settings),
        "p_value": verdict.p_value,
        "tests": verdict.tests,
        "strays": verdict.strays,
        "draws": sum(len(sent.draws) for sent in log.sent),
        "unanswered": sum(not sent.answered for sent in log.sent),
        "least_likely": f"{worst.family} {worst.user} {' '.join(worst.captured)}".strip(),
        "elapsed_s": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    """Runs what is missing of the trials that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--attacks", default="steer,drop,none")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--requests", type=int, default=680)
    given = parser.parse_args()
    size = Size(given.users, given.requests)
    trials: list[dict[str, Any]] = json.loads(RESULT.read_text())["trials"] if RESULT.exists() else []
    done = {(one["attack"], one["seed"], one["users"], one["requests"]) for one in trials}
    for seed in range(given.seeds):
        for attack in map(Attack, given.attacks.split(",")):
            if (str(attack), seed, size.users, size.requests) in done:
                continue
            trials.append(run_one(attack, seed, size))
            RESULT.write_text(json.dumps({"rate": RATE, "trials": trials}, indent=1) + "\n")
            print(trials[-1], flush=True)


if __name__ == "__main__":
    main()
