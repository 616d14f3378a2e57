"""`cloister verify routing`: tests whether anyone but the client influences which node gets a request."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloister.cli.console import err, leave, make_progress, out, print_json, print_line, print_table
from cloister.cli.options import LEAST_PRESENT, MOST_SHARE, AcceptMaskedChips, AcceptMembership, LeastPresent, MostShare
from cloister.client.routing_audit.records import Attack
from cloister.types.errors import CloisterError, ConfigError

if TYPE_CHECKING:
    from cloister.client import Limits
    from cloister.client.routing_audit.audit import Audit, AuditUser
    from cloister.client.routing_audit.charges import AuditVerdict
    from cloister.client.routing_audit.hypotheses import RoutingVerdict
    from cloister.trust.attestation import AttestationPolicy
    from cloister.trust.transparency.membership import Membership


NOT_HONEST, CANNOT_TEST = 1, 2
RATE = 0.05
"""Smallest fraction of one user's requests for which the trial guarantees to detect an attack."""
CHANCE = 0.99
VICTIM = "user-3"


def routing(
    relay: Annotated[
        list[str] | None,
        typer.Option(
            help="Audit the deployment behind this relay; may be repeated. Unset, a cloud in this process.", metavar="URL"
        ),
    ] = None,
    trust: Annotated[
        Path | None, typer.Option(help="With --relay: trust file with keys of log, witnesses and releases.", metavar="FILE")
    ] = None,
    api_key_file: Annotated[
        list[Path] | None, typer.Option(help="With --relay: an API key for the issuer; repeat for more users.", metavar="FILE")
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="With --relay: requirements for nodes, JSON.", metavar="FILE")] = None,
    accept_software: Annotated[
        bool, typer.Option("--accept-software", help="With --relay: send to nodes without hardware attestation.")
    ] = False,
    detect: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="With --relay: steered fraction of one user's requests to detect.")
    ] = 0.2,
    state: Annotated[Path | None, typer.Option(help="With --relay: view of the log, as for `proxy`.", metavar="FILE")] = None,
    least_present: LeastPresent = LEAST_PRESENT,
    most_share: MostShare = MOST_SHARE,
    accept_membership: AcceptMembership = 0,
    accept_masked_chips: AcceptMaskedChips = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --relay: spend tokens without asking.")] = False,
    users: Annotated[
        int | None,
        typer.Option(min=2, help="Users, each with its own client; 10, or 4 with --relay.", show_default=False),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of each user; 600, or with --relay what --detect needs.", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for a reproducible trial; unset, draws as clients do.")] = None,
    attack: Annotated[
        Attack, typer.Option(help="Let the gateway attack one user's requests in this way, to test detection.")
    ] = Attack.NONE,
    rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="With --attack: the attacked fraction.")] = RATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Test that every set of nodes gets each user's requests by its share of the capacity, and by nothing else.

    Runs relay, gateway, issuer and nodes in this process, with nodes joining, leaving and failing, and sends the requests of
    many users through the real client. With --relay it audits a deployment by the same tests, and also checks membership,
    capacities, the issuer's keys and response times; it states the number of tokens beforehand. Exit status 0: honest
    (Holm-corrected p > 1e-4, and requests enough to have found 5% of one user's steered, or --detect); 1: not honest; 2: it
    could not be tested, or with too few requests.
    """
    if relay:
        raise typer.Exit(
            _audit_relays(relay, trust, api_key_file, policy, accept_software, detect, state, users, requests, yes, as_json,
                   least_present=least_present, most_share=most_share, accept_membership=accept_membership,
                   accept_masked_chips=accept_masked_chips)
        )  # fmt: skip
    users, requests = users or 10, requests or 600
    from cloister.client.routing_audit.adversary import make_adversary
    from cloister.client.routing_audit.hypotheses import judge
    from cloister.client.routing_audit.trial import CAPTURED, Size, run_trial

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
        leave(f"could not test: {error}", CANNOT_TEST)
    chance = _power(users, requests, verdict.tests)
    _print(verdict, chance, as_json)
    if not verdict.honest:
        raise typer.Exit(NOT_HONEST)
    if chance < CHANCE:
        raise typer.Exit(CANNOT_TEST)


def _audit_relays(
    relays: list[str],
    trust: Path | None,
    api_key_files: list[Path] | None,
    policy: Path | None,
    accept_software: bool,
    detect: float,
    state: Path | None,
    users: int | None,
    requests: int | None,
    yes: bool,
    as_json: bool,
    **limits: Any,
) -> int:
    from cloister.cli.proxy import read_api_key
    from cloister.client import Limits
    from cloister.trust.attestation import AttestationPolicy
    from cloister.trust.attestation.policy_file import read_policy, with_demands

    if trust is None or not api_key_files:
        raise ConfigError("an audit needs to know whom to believe and what to pay with: give --trust and --api-key-file")
    wanted = with_demands(AttestationPolicy() if policy is None else read_policy(policy), accept_software=accept_software)
    keys = tuple(read_api_key(path) for path in api_key_files)
    return audit_deployment(
        AuditSettings(
            tuple(relays), trust, keys, wanted, Limits(**limits), users or 4, requests, detect, state, yes, as_json
        )
    )  # fmt: skip


def _power(users: int, requests: int, tests: int) -> float:
    from cloister.client.routing_audit.tails import power
    from cloister.client.routing_audit.trial import CAPTURED, PLAN

    share = max(spell.share((CAPTURED,)) for spell in PLAN)
    return power(requests, users=users, rate=RATE, captured=share, tests=tests)


def _memory() -> Path | None:
    """A directory in memory: files of a trial are discarded."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None


def _print(verdict: RoutingVerdict, chance: float, as_json: bool) -> None:
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


@dataclass(frozen=True)
class AuditSettings:
    """Settings of an audit.

    Attributes:
        relays: addresses of relays, assigned to users in turn.
        api_keys: API keys, assigned to users in turn.
        requests: requests of each user; None for as many as detect `detect` with a probability of 0.99.
        detect: fraction of one user's requests whose steering must be detected.
        state: file with the view of the log.
        is_agreed: whether to spend without asking.
    """

    relays: tuple[str, ...]
    trust: Path
    api_keys: tuple[str, ...]
    policy: AttestationPolicy
    limits: Limits
    users: int
    requests: int | None
    detect: float
    state: Path | None
    is_agreed: bool
    as_json: bool


def audit_deployment(settings: AuditSettings) -> int:
    """Runs the audit, prints what was found, and returns the exit status."""
    try:
        return asyncio.run(_audit(settings))
    except (CloisterError, OSError) as error:
        print_line(f"could not test: {error}", "bold red", console=err)
        return CANNOT_TEST


async def _audit(settings: AuditSettings) -> int:
    from cloister.client import EpochRefusedError, EvidenceRefusedError, NoTokensError
    from cloister.client.routing_audit.audit import Audit, Refusal
    from cloister.client.routing_audit.charges import judge_audit

    users = _make_users(settings)
    try:
        try:
            membership = await _look(users[0])
        except (EpochRefusedError, EvidenceRefusedError, NoTokensError) as error:
            verdict = judge_audit(Audit(refusals=[Refusal(users[0].name, error)]))
            return _report(verdict, 0.0, 0, settings)
        requests = settings.requests or _enough(settings, membership)
        _ask_to_spend(settings, requests)
        audit = await _run(users, requests)
    finally:
        for user in users:
            await user.carrier.aclose()
    verdict = judge_audit(audit)
    return _report(verdict, _chance(settings, membership, requests, verdict.tests), len(audit.sent), settings)


def _make_users(settings: AuditSettings) -> list[AuditUser]:
    import httpx

    from cloister.client import Session
    from cloister.client.routing_audit.audit import AuditUser

    users = []
    for number in range(settings.users):
        session = Session(
            settings.relays[number % len(settings.relays)],
            trust=settings.trust,
            api_key=settings.api_keys[number % len(settings.api_keys)],
            policy=settings.policy,
            limits=settings.limits,
            state=settings.state,
            remember=number == 0,  # one client returns, the others are new
        )
        users.append(AuditUser(f"user-{number}", session, httpx.AsyncHTTPTransport()))
    return users


async def _look(user: AuditUser) -> Membership:
    from cloister.client import AsyncSealedTransport

    user.session.give_back(await AsyncSealedTransport(user.session, user.carrier).prepare())
    assert user.session.believed is not None, "it was prepared"
    return user.session.believed.membership


async def _run(users: list[AuditUser], requests: int) -> Audit:
    from cloister.client.routing_audit.audit import Auditor

    with make_progress() as progress:
        task = progress.add_task("requests", total=len(users) * requests)
        auditor = Auditor(users, secrets.SystemRandom(), lambda done: progress.update(task, completed=done))
        return await auditor.run(requests)


def _share(membership: Membership) -> float:
    return max(member.capacity for member in membership.members) / membership.capacity


def _enough(settings: AuditSettings, membership: Membership) -> int:
    from cloister.client.routing_audit.hypotheses import count_tests
    from cloister.client.routing_audit.tails import requests_needed

    tests = count_tests(len(membership.members), settings.users)
    if _share(membership) >= 1.0:
        raise ConfigError("there is only one node, so requests cannot be steered; there is nothing to test")
    captured = _share(membership)
    return requests_needed(
        users=settings.users, rate=settings.detect, captured=captured, tests=tests, seeds=1, chance=CHANCE, level=_level()
    )


def _chance(settings: AuditSettings, membership: Membership, requests: int, tests: int) -> float:
    from cloister.client.routing_audit.tails import power

    return power(
        requests,
        users=settings.users,
        rate=settings.detect,
        captured=_share(membership),
        tests=max(tests, 1),
        level=_level(),
    )


def _level() -> float:
    from cloister.client.routing_audit.hypotheses import HONEST_ABOVE

    return HONEST_ABOVE


def _ask_to_spend(settings: AuditSettings, requests: int) -> None:
    from cloister.client.routing_audit.audit import most_tokens

    total, tokens = settings.users * requests, most_tokens(settings.users, requests)
    keys = len(set(settings.api_keys))
    err.print(
        f"This sends {total:,} requests as {settings.users} users, and buys at most {tokens:,} tokens with {keys} API "
        f"key{'s' if keys > 1 else ''}.",
        highlight=False,
    )
    try:
        is_agreed = settings.is_agreed or typer.confirm("Spend them?", err=True)
    except typer.Abort:  # no terminal to ask
        is_agreed = False
    if not is_agreed:
        raise ConfigError("nothing was spent; give --yes to agree beforehand, or fewer --requests")


def _report(verdict: AuditVerdict, chance: float, requests: int, settings: AuditSettings) -> int:
    if settings.as_json:
        print_json(
            {
                "honest": not verdict.charges and not verdict.unfinished,
                "charges": [asdict(charge) for charge in verdict.charges],
                "unfinished": verdict.unfinished,
                "p_value": verdict.p_value,
                "tests": verdict.tests,
                "requests": requests,
                "detect": settings.detect,
                "power": chance,
            }
        )
    for charge in () if settings.as_json else verdict.charges:
        who = f" ({charge.user})" if charge.user else ""
        print_line(f"{charge.kind}{who}: {charge.text}", "red")
    for line in verdict.unfinished:
        print_line(f"could not test: {line}", "yellow", console=err)
    if verdict.charges:
        return _say(settings, "NOT HONEST: " + ", ".join(sorted({charge.kind for charge in verdict.charges})), NOT_HONEST)
    found = f"{settings.detect:.0%} of one user's requests steered would be found with a chance of {chance:.4f}"
    if verdict.unfinished or chance < CHANCE:
        return _say(settings, f"Nothing speaks against it, but too little was tested: {found}. Raise --requests.", CANNOT_TEST)
    return _say(settings, f"Honest, as far as {requests} requests show: {found}.", 0)


def _say(settings: AuditSettings, text: str, status: int) -> int:
    if not settings.as_json:
        style = {0: "green", NOT_HONEST: "bold red"}.get(status, "yellow")
        print_line(text, style)
    return status
