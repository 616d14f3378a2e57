"""`cloister verify routing`: whether anybody but the client has a say in which node gets a request."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import err, make_progress, out, print_json, print_table
from cloister.client.routing.attack import Attack
from cloister.types.errors import CloisterError

if TYPE_CHECKING:
    from cloister.client.routing.verdict import Verdict

NOT_HONEST, CANNOT_TEST = 1, 2
RATE = 0.05
"""What an attack has to touch of one user's requests so that the trial promises to find it."""
CHANCE = 0.99
VICTIM = "user-3"


def routing(
    users: Annotated[int, typer.Option(min=2, help="Users, each with a client of their own.")] = 10,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each user.")] = 600,
    seed: Annotated[int | None, typer.Option(help="Draw from a seed, to repeat a trial; unset, as clients draw.")] = None,
    attack: Annotated[
        Attack, typer.Option(help="Let the gateway do this to one user's requests, to see it found.")
    ] = Attack.NONE,
    rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="With --attack: the part that is attacked.")] = RATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Test that every set of nodes gets each user's requests by its share of the capacity, and by nothing else.

    Runs relay, gateway, issuer and nodes in this process, nodes joining, leaving and failing, and sends the requests of many
    users through the real client. Exit status 0: honest (Holm-corrected p > 1e-4, and requests enough to have found 5% of one
    user's steered); 1: not honest; 2: it could not be tested, or with too few requests.
    """
    from cloister.client.routing.adversary import make_adversary
    from cloister.client.routing.trial import CAPTURED, Size, run_trial
    from cloister.client.routing.verdict import judge

    book = make_adversary(attack, rate=rate, captured=CAPTURED, victim=VICTIM, seed=seed)
    try:
        with tempfile.TemporaryDirectory(dir=_memory()) as directory, make_progress() as progress:
            task = progress.add_task("requests", total=users * requests)
            trial = run_trial(
                Path(directory),
                Size(users, requests),
                seed=seed,
                make_book=book,
                tell=lambda done: progress.update(task, completed=done),
            )
            verdict = judge(asyncio.run(trial))
    except (CloisterError, OSError) as error:
        err.print(f"could not test: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(CANNOT_TEST) from None
    chance = _power(users, requests, verdict.tests)
    _print(verdict, chance, as_json)
    if not verdict.honest:
        raise typer.Exit(NOT_HONEST)
    if chance < CHANCE:
        raise typer.Exit(CANNOT_TEST)


def _power(users: int, requests: int, tests: int) -> float:
    from cloister.client.routing.power import power
    from cloister.client.routing.trial import CAPTURED, PLAN

    share = max(spell.share((CAPTURED,)) for spell in PLAN)
    return power(requests, users=users, rate=RATE, captured=share, tests=tests)


def _memory() -> Path | None:
    """Where files cost no disk: what a trial writes is thrown away."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None


def _print(verdict: Verdict, chance: float, as_json: bool) -> None:
    if as_json:
        worst = [{**asdict(finding), "corrected_p": p} for finding, p in verdict.worst]
        print_json(
            {
                "honest": verdict.honest,
                "p_value": verdict.p_value,
                "tests": verdict.tests,
                "strays": verdict.strays,
                "power": chance,
                "worst": worst,
            }
        )
        return
    rows = [
        (f"{f.family}: {f.user}", " ".join(f.captured) or "-", f"{f.observed:g}", f"{f.expected:.1f}", f.trials, f"{p:.3g}")
        for f, p in verdict.worst
    ]
    print_table("Least likely of all tests", ("test", "nodes", "seen", "expected", "of", "corrected p"), rows)
    out.print(f"{verdict.tests} tests, smallest Holm-corrected p {verdict.p_value:.3g}; {verdict.strays} requests went astray.")
    out.print(f"A gateway that steers {RATE:.0%} of one user's requests would be found with a chance of {chance:.4f}.")
    if not verdict.honest:
        out.print("NOT HONEST: somebody but the clients has a say in which node gets a request.", style="bold red")
    elif chance < CHANCE:
        out.print("Nothing speaks against it, but there are too few requests to say so; raise --requests.", style="yellow")
    else:
        out.print("Honest: each set of nodes gets each user's requests by its share of the capacity.", style="green")
