"""Sends requests to a deployment as many users, and records what each was shown and how long answers took.

The clients are the real ones, each with its own state and wallet, and send requests in random order, so that effects common to
all users affect all of them equally.
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
from cloister.client.routing_audit.records import Sent, Spell, TrialLog
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
"""Number of concurrent requests."""
ROUNDS = 3
"""How often all users fetch again before a difference counts: a new epoch may begin between two fetches."""
ANSWER_S = 60.0
"""Timeout of an answer."""
PATH = "/v1/models"
"""The request: the cheapest one that is sealed to a node; it costs a token like any other."""
FILLERS = tuple(b" " * length for length in (0, 2 << 10, 8 << 10))
"""Lengths of padding content, so that requests have the same size buckets as those of users. A gateway could recognise requests
of a single length."""


@dataclass(frozen=True)
class AuditUser:
    """One user of an audit.

    Attributes:
        carrier: HTTP transport of this user.
    """

    name: str
    session: Session
    carrier: httpx.AsyncBaseTransport


@dataclass(frozen=True)
class Refusal:
    """A client refused what it was shown and sent nothing."""

    user: str
    error: SealedError


@dataclass
class Audit:
    """The observations of an audit.

    Attributes:
        refusals: at most one for each user, who then sends no more requests.
        failed_steps: slugs of failed steps of a node's evidence, by the member's name.
        differences: what differed between users in each of `ROUNDS` fetches: `epoch`, `issuer`.
        times: seconds from request to the answer's head, by user, for requests whose first draw answered; infinite for a
            timeout.
    """

    spells: list[Spell] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    failed_steps: dict[str, set[str]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    times: list[tuple[str, float]] = field(default_factory=list)

    @property
    def log(self) -> TrialLog:
        """The draws and answers, for the hypotheses."""
        return TrialLog(tuple(self.spells), tuple(self.sent))


def most_tokens(users: int, requests: int) -> int:
    """Returns the maximum number of tokens that an audit buys: a request may draw three times, and tokens are sold in
    batches."""
    return users * (-(-(requests * MAX_DRAWS) // BATCH) + 1) * BATCH


class Auditor:
    """Runs an audit.

    Args:
        users: with a session and a carrier each.
        source: random source of their order.
        tell: called with the number of finished requests.
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
        """Sends the given number of requests for each user, and checks whether all are shown the same.

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
        for name, error in self._refused.items():  # a client that is always refused may have a wrong clock
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
            pass  # cut off after its head: the node did answer, and only its identity matters
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
        """Records a request without any answer, whatever the reason: refused, unreachable or silent."""
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
        if names and set(names) <= set(self._audit.spells[spell].capacities):  # a draw across two epochs belongs to neither
            self._audit.sent.append(Sent(user.name, spell, names, is_answered, names[-1:] if is_answered else ()))

    async def _compare(self) -> None:
        """All users fetch again what must be the same for all; a difference in every round is not a coincidence."""
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
    """A transport that stays open when its client is closed."""

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
    """Returns the parts that must be the same for all users; cosignatures may differ."""
    try:
        parsed = parse_bundle(bundle)
    except (TransparencyError, CloisterError):
        return bundle
    return b"%d " % parsed.index + epoch_leaf(parsed.epoch)
