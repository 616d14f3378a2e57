"""Asks a deployment as many users would, and writes down what each of them was shown and how long it took.

The clients are the real ones, each with a memory and a wallet of its own, and their requests come in random order: whatever is
the same for everybody falls on all of them alike.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from cloister.client.attempts import DRAWN
from cloister.client.errors import FinalRefusalError, NoAnswerError, RelayUnreachableError, SealedError
from cloister.client.node_selection import MAX_DRAWS
from cloister.client.protocol import DEADLINE_S
from cloister.client.routing.records import Sent, Spell, TrialLog
from cloister.client.session import WELL_KNOWN, Session
from cloister.client.token_purchase import BATCH
from cloister.client.transport import AsyncSealedTransport
from cloister.trust.attestation import Outcome
from cloister.trust.tokens.issuance import DIRECTORY_PATH
from cloister.trust.transparency.checks import VerifiedEpoch
from cloister.trust.transparency.epoch import MAX_BUNDLE_BYTES, epoch_leaf, parse_bundle
from cloister.trust.transparency.refusal import TransparencyError
from cloister.types.errors import CloisterError

AT_ONCE = 4
"""Requests that are on their way together."""
ROUNDS = 3
"""How often everybody looks again before a difference is one: a new epoch may come between two looks."""
ANSWER_S = 60.0
"""How long an answer may take."""
PATH = "/v1/models"
"""What is asked: the cheapest thing that is sealed to a node; it costs a token like everything else."""
FILLERS = tuple(b" " * length for length in (0, 2 << 10, 8 << 10))
"""What goes along, and is read by nobody: so requests are as long as those of users, whose first buckets these are. Of one
length alone a gateway could tell them from all others."""


@dataclass(frozen=True)
class AuditUser:
    """One user of an audit.

    Attributes:
        carrier: what speaks HTTP for this user.
    """

    name: str
    session: Session
    carrier: httpx.AsyncBaseTransport


@dataclass(frozen=True)
class Refusal:
    """A client refused what it was shown, and sent nothing."""

    user: str
    error: SealedError


@dataclass
class Audit:
    """What was seen.

    Attributes:
        refusals: at most one a user, which then asks no more.
        failed_steps: slugs of steps of a node's evidence that failed, by the member's name.
        differences: what users were shown differently in each of `ROUNDS` looks: `epoch`, `issuer`.
        times: seconds from asking to the answer's head, by user, of requests whose first draw answered; infinite: too long.
    """

    spells: list[Spell] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    failed_steps: dict[str, set[str]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    times: list[tuple[str, float]] = field(default_factory=list)

    @property
    def log(self) -> TrialLog:
        """What was drawn and what answered, for the hypotheses."""
        return TrialLog(tuple(self.spells), tuple(self.sent))


def most_tokens(users: int, requests: int) -> int:
    """Returns how many tokens an audit buys at most: every request may draw three times, and tokens come in batches."""
    return users * (-(-(requests * MAX_DRAWS) // BATCH) + 1) * BATCH


class Auditor:
    """Runs an audit.

    Args:
        users: with a session and a carrier each.
        source: of the order in which they ask.
        tell: called with the number of requests that are done.
    """

    def __init__(
        self, users: Sequence[AuditUser], source: random.Random, tell: Callable[[int], None] = lambda done: None
    ) -> None:
        self._users = users
        self._source = source
        self._tell = tell
        self._done = 0
        self._audit = Audit()
        self._spells: dict[int, int] = {}
        self._members: dict[str, str] = {}
        self._gave_up: set[str] = set()
        self._refused: dict[str, SealedError] = {}

    async def run(self, requests: int) -> Audit:
        """Sends so many requests for each user, and looks whether everybody is shown the same.

        Raises:
            RelayUnreachableError: relay or issuer cannot be reached.
        """
        clients = {
            user.name: httpx.AsyncClient(
                transport=AsyncSealedTransport(user.session, user.carrier), base_url="http://cloister", timeout=ANSWER_S
            )
            for user in self._users
        }
        due = [user for user in self._users for _ in range(requests)]
        self._source.shuffle(due)
        waiting = iter(due)

        async def work() -> None:
            for user in waiting:
                if user.name not in self._gave_up:
                    await self._ask(user, clients[user.name])
                self._done += 1
                self._tell(self._done)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        answered = {sent.user for sent in self._audit.sent if sent.answered}
        for name, error in self._refused.items():  # who is always refused has a clock that is wrong, say
            if name not in answered:
                self._audit.refusals.append(Refusal(name, error))
        await self._compare()
        return self._audit

    async def _ask(self, user: AuditUser, client: httpx.AsyncClient) -> None:
        begun = time.monotonic()
        request = client.build_request("GET", PATH, content=self._source.choice(FILLERS))
        try:
            response = await client.send(request)
        except (NoAnswerError, FinalRefusalError) as error:
            self._lose(user, request)
            if isinstance(error, FinalRefusalError):
                self._refused.setdefault(user.name, error)
        except httpx.TimeoutException:
            self._lose(user, request)
            self._audit.times.append((user.name, float("inf")))
        except httpx.TransportError:
            pass  # broken off behind its head: the node answered, and the test is about which one
        except RelayUnreachableError:
            raise
        except SealedError as error:
            self._audit.refusals.append(Refusal(user.name, error))
            self._gave_up.add(user.name)
        else:
            self._note(user)
            about = response.extensions["cloister"]
            if len(about["drawn"]) == 1:
                self._audit.times.append((user.name, time.monotonic() - begun))
            self._keep(user, about["epoch"], about["drawn"], True)

    def _lose(self, user: AuditUser, request: httpx.Request) -> None:
        """Takes in a request whose every draw brought no answer, however that was withheld: refused, away, or silent."""
        self._note(user)
        self._keep(user, self._epoch(user), request.extensions.get(DRAWN, ()), False)

    def _epoch(self, user: AuditUser) -> int:
        return user.session.believed.epoch.epoch if user.session.believed else 0

    def _note(self, user: AuditUser) -> None:
        believed = user.session.believed
        if believed is None or believed.epoch.epoch in self._spells:
            return
        self._spells[believed.epoch.epoch] = len(self._audit.spells)
        self._audit.spells.append(_spell(believed))
        for node in believed.epoch.nodes:
            self._members[node.node_id] = node.member
            failed = user.session.findings[node.node_id].of(Outcome.FAILED)
            self._audit.failed_steps.setdefault(node.member, set()).update(step.slug for step in failed)

    def _keep(self, user: AuditUser, epoch: int, drawn: Sequence[str], is_answered: bool) -> None:
        spell = self._spells.get(epoch)
        if spell is None:
            return
        names = tuple(self._members.get(one, one) for one in drawn)
        if names and set(names) <= set(self._audit.spells[spell].capacities):  # a draw across two epochs is of neither
            self._audit.sent.append(Sent(user.name, spell, names, is_answered, names[-1:] if is_answered else ()))

    async def _compare(self) -> None:
        """Everybody looks again at what must be the same for all; what differs each time is no coincidence."""
        differing: dict[str, int] = {"epoch": 0, "issuer": 0}
        for _ in range(ROUNDS):
            epochs = {await self._look(user, _epoch_url(user), _name_epoch) for user in self._users}
            directories = {await self._look(user, _directory_url(user), bytes) for user in self._users}
            differing["epoch"] += len(epochs) > 1
            differing["issuer"] += len(directories) > 1
        self._audit.differences += [what for what, times in differing.items() if times == ROUNDS]

    async def _look(self, user: AuditUser, url: str, name: Callable[[bytes], bytes]) -> bytes:
        async with httpx.AsyncClient(transport=_Borrowed(user.carrier), timeout=DEADLINE_S) as client:
            try:
                async with client.stream("GET", url) as response:
                    content = b""
                    async for piece in response.aiter_bytes():
                        content += piece
                        if len(content) > MAX_BUNDLE_BYTES:
                            break
            except httpx.HTTPError as error:
                return type(error).__name__.encode()
        return name(content) if response.status_code == httpx.codes.OK else b"%d" % response.status_code


class _Borrowed(httpx.AsyncBaseTransport):
    """A carrier that stays open when the client that uses it is closed."""

    def __init__(self, carrier: httpx.AsyncBaseTransport) -> None:
        self._carrier = carrier

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._carrier.handle_async_request(request)


def _spell(believed: VerifiedEpoch) -> Spell:
    capacities = {member.name: member.capacity for member in believed.membership.members}
    present = {node.member for node in believed.epoch.nodes}
    return Spell(capacities, down=frozenset(capacities) - present)


def _epoch_url(user: AuditUser) -> str:
    return f"{user.session.relay.rstrip('/')}{WELL_KNOWN}/epoch"


def _directory_url(user: AuditUser) -> str:
    issuer = user.session.trust.issuer
    assert issuer is not None, "an audit buys tokens"
    return issuer.url.rstrip("/") + DIRECTORY_PATH


def _name_epoch(bundle: bytes) -> bytes:
    """Returns what has to be the same for everybody; cosignatures may differ."""
    try:
        parsed = parse_bundle(bundle)
    except (TransparencyError, CloisterError):
        return bundle
    return b"%d " % parsed.index + epoch_leaf(parsed.epoch)
