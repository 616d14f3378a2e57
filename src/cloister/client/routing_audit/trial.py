"""Sends the requests of a trial: many users, each with its own client, through the whole path."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from cloister.client.errors import EvidenceRefusedError, NoAnswerError
from cloister.client.limits import Limits
from cloister.client.node_selection import Below
from cloister.client.routing_audit.cloud import RELAY, MakeBook, SealedCloud, current_user
from cloister.client.routing_audit.records import Sent, Spell, TrialLog
from cloister.client.session import Session
from cloister.client.transport import AsyncSealedTransport
from cloister.trust.attestation import AttestationPolicy

AT_ONCE = 16
"""Number of concurrent requests."""
CAPTURED = "c"
"""The node that the adversary controls, if any."""

PLAN = (
    Spell({"a": 2, "b": 1, "c": 1}),
    Spell({"a": 2, "b": 1, "c": 2, "d": 3}),
    Spell({"b": 1, "c": 1, "d": 2}),
    Spell({"b": 1, "c": 1, "d": 2}, down=frozenset({"b"})),
    Spell({"b": 1, "c": 2, "d": 3, "e": 2}),
)
"""Nodes join (d, e), leave (a), change their capacity (c), and one fails while the epoch still names it (b)."""

LIMITS = Limits(most_change=3 / 4)
"""The plan makes changes within an hour that clients otherwise accept over two days."""


@dataclass(frozen=True)
class Size:
    """How large a trial is.

    Attributes:
        users: number of users, with equal numbers of requests.
        requests: number of requests of each user, over all spells.
    """

    users: int = 10
    requests: int = 600


@dataclass(frozen=True)
class _Seen:
    """One request from its client's view."""

    user: str
    spell: int
    mark: str
    drawn: tuple[str, ...]
    answered: bool


class _User:
    def __init__(self, name: str, cloud: SealedCloud, below: Below) -> None:
        self.name = name
        cloud.credentials, api_key = cloud.credentials.add(name)
        policy = AttestationPolicy(accept_software=True)
        session = Session(
            RELAY, trust=cloud.trust, api_key=api_key, policy=policy, limits=LIMITS, below=below, now=cloud.now, remember=False
        )
        self._client = httpx.AsyncClient(transport=AsyncSealedTransport(session, cloud.carrier()), base_url="http://cloister")

    async def ask(self, mark: str) -> tuple[tuple[str, ...], bool]:
        """Sends one marked request; returns the nodes that were drawn, by node_id, and whether one answered."""
        current_user.set(self.name)
        try:
            response = await self._client.post("/v1/chat/completions", json={"mark": mark})
        except NoAnswerError as error:
            return error.draws, False
        if response.status_code != 200:
            raise EvidenceRefusedError(f"a node of the trial answered {response.status_code}")
        return response.extensions["cloister"]["drawn"], True


async def run_trial(
    directory: Path,
    size: Size,
    *,
    seed: int | None = None,
    make_book: MakeBook | None = None,
    plan: Sequence[Spell] = PLAN,
    tell: Callable[[int], None] = lambda done: None,
) -> TrialLog:
    """Runs a trial and returns its records.

    Args:
        directory: an empty one.
        seed: seed of draws and order; None uses the system's randomness, as clients do.
        make_book: an adversary's (`adversary.make_adversary`).
        tell: called with the number of finished requests.

    Raises:
        CloisterError: the trial cannot run.
    """
    source = random.Random(seed) if seed is not None else random.SystemRandom()
    below = source.randrange if seed is not None else secrets.randbelow
    cloud = SealedCloud(directory, make_book)
    users = [_User(f"user-{number}", cloud, below) for number in range(size.users)]
    try:
        return await _run(cloud, users, size, source, plan, tell)
    finally:
        cloud.close()


async def _run(
    cloud: SealedCloud,
    users: list[_User],
    size: Size,
    source: random.Random,
    plan: Sequence[Spell],
    tell: Callable[[int], None],
) -> TrialLog:
    seen: list[_Seen] = []

    async def work(spell: int, due: Iterator[tuple[_User, str]]) -> None:
        for user, mark in due:
            drawn, answered = await user.ask(mark)
            seen.append(_Seen(user.name, spell, mark, tuple(cloud.names.get(one, one) for one in drawn), answered))
            tell(len(seen))

    for number, spell in enumerate(plan):
        await cloud.enter(spell)
        begin, end = (size.requests * (number + more) // len(plan) for more in (0, 1))
        marks = [(user, f"{user.name}/{mark}") for user in users for mark in range(begin, end)]
        source.shuffle(marks)
        due = iter(marks)
        await asyncio.gather(*(work(number, due) for _ in range(AT_ONCE)))
    opened = cloud.opened()
    sent = [Sent(one.user, one.spell, one.drawn, one.answered, tuple(opened.get(one.mark, ()))) for one in seen]
    return TrialLog(tuple(plan), tuple(sent), cloud.strays)
