"""`cloister verify routing --relay`: audits a live deployment through its relay."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cloister.cli.console import err, make_progress, out, print_json
from cloister.types.errors import CloisterError, ConfigError

if TYPE_CHECKING:
    from cloister.client import Limits
    from cloister.client.routing.audit import Audit, AuditUser
    from cloister.client.routing.charges import AuditVerdict
    from cloister.trust.attestation import AttestationPolicy
    from cloister.trust.transparency.membership import Membership

DISHONEST, CANNOT_TEST = 1, 2
CHANCE = 0.99


@dataclass(frozen=True)
class AuditSettings:
    """What is asked for.

    Attributes:
        relays: addresses of relays; users take them in turn.
        api_keys: of users, in turn.
        requests: of each user; None for as many as find `detect` with a chance of 0.99.
        detect: part of one user's requests that must not be steered unseen.
        state: file of what was seen of the log before.
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
        err.print(f"could not test: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        return CANNOT_TEST


async def _audit(settings: AuditSettings) -> int:
    from cloister.client import EpochRefusedError, EvidenceRefusedError, NoTokensError
    from cloister.client.routing.audit import Audit, Refusal
    from cloister.client.routing.charges import judge_audit

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
    from cloister.client.routing.audit import AuditUser

    users = []
    for number in range(settings.users):
        session = Session(
            settings.relays[number % len(settings.relays)],
            trust=settings.trust,
            api_key=settings.api_keys[number % len(settings.api_keys)],
            policy=settings.policy,
            limits=settings.limits,
            state=settings.state,
            remember=number == 0,  # one comes again, the others for the first time
        )
        users.append(AuditUser(f"user-{number}", session, httpx.AsyncHTTPTransport()))
    return users


async def _look(user: AuditUser) -> Membership:
    from cloister.client import AsyncSealedTransport

    user.session.give_back(await AsyncSealedTransport(user.session, user.carrier).prepare())
    assert user.session.believed is not None, "it was prepared"
    return user.session.believed.membership


async def _run(users: list[AuditUser], requests: int) -> Audit:
    from cloister.client.routing.audit import Auditor

    with make_progress() as progress:
        task = progress.add_task("requests", total=len(users) * requests)
        auditor = Auditor(users, secrets.SystemRandom(), lambda done: progress.update(task, completed=done))
        return await auditor.run(requests)


def _share(membership: Membership) -> float:
    return max(member.capacity for member in membership.members) / membership.capacity


def _enough(settings: AuditSettings, membership: Membership) -> int:
    from cloister.client.routing.hypotheses import count_tests
    from cloister.client.routing.tails import requests_needed

    tests = count_tests(len(membership.members), settings.users)
    if _share(membership) >= 1.0:
        raise ConfigError("there is one node, so nobody could be steered anywhere; there is nothing to test")
    captured = _share(membership)
    return requests_needed(
        users=settings.users, rate=settings.detect, captured=captured, tests=tests, seeds=1, chance=CHANCE, level=_level()
    )


def _chance(settings: AuditSettings, membership: Membership, requests: int, tests: int) -> float:
    from cloister.client.routing.tails import power

    return power(
        requests,
        users=settings.users,
        rate=settings.detect,
        captured=_share(membership),
        tests=max(tests, 1),
        level=_level(),
    )


def _level() -> float:
    from cloister.client.routing.hypotheses import HONEST_ABOVE

    return HONEST_ABOVE


def _ask_to_spend(settings: AuditSettings, requests: int) -> None:
    from cloister.client.routing.audit import most_tokens

    total, tokens = settings.users * requests, most_tokens(settings.users, requests)
    keys = len(set(settings.api_keys))
    err.print(
        f"This sends {total:,} requests as {settings.users} users, and buys at most {tokens:,} tokens with {keys} API "
        f"key{'s' if keys > 1 else ''}.",
        highlight=False,
    )
    try:
        is_agreed = settings.is_agreed or typer.confirm("Spend them?", err=True)
    except typer.Abort:  # nobody is there to ask
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
        out.print(f"{charge.kind}{who}: {charge.text}", style="red", markup=False, highlight=False, soft_wrap=True)
    for line in verdict.unfinished:
        err.print(f"could not test: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if verdict.charges:
        return _say(settings, "NOT HONEST: " + ", ".join(sorted({charge.kind for charge in verdict.charges})), DISHONEST)
    found = f"{settings.detect:.0%} of one user's requests steered would be found with a chance of {chance:.4f}"
    if verdict.unfinished or chance < CHANCE:
        return _say(settings, f"Nothing speaks against it, but too little was tested: {found}. Raise --requests.", CANNOT_TEST)
    return _say(settings, f"Honest, as far as {requests} requests show: {found}.", 0)


def _say(settings: AuditSettings, text: str, status: int) -> int:
    if not settings.as_json:
        style = {0: "green", DISHONEST: "bold red"}.get(status, "yellow")
        out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    return status
