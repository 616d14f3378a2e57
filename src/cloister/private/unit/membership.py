"""Membership of a sealed unit: the leader connects to its members, and both sides verify each other's evidence, again whenever
it is renewed. A machine is dropped if its evidence is refused or if it is silent.

The leader's workers may use a member only if it is listed in every statement of the leader under which a request may still run:
a client that sealed to the leader under an older statement agreed to the machines in that one. Such a request may arrive until
the statement's key ends, which may be later than the end of the statement itself, if a member's evidence ended first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import msgspec

from cloister.engine.channel import wait_readable
from cloister.private.unit.pairing import (
    CARRY,
    JOIN,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    REFUSED,
    LeaderHandshake,
    MemberHandshake,
    Pair,
    SealedRecords,
    UnitKey,
    UnitRefusedError,
    digest_of,
    encode_refusal,
)
from cloister.private.unit.peer_verification import PeerVerifier, read_leader_key
from cloister.trust.attestation import Statement, read_evidence, read_statement
from cloister.trust.attestation.base import MAX_CLOCK_SKEW_S
from cloister.trust.attestation.evidence import MAX_EVIDENCE_BYTES, MAX_EXTRAS
from cloister.trust.attestation.unit import member_extra
from cloister.trust.sealing import NODE_KEY_LIFE_S
from cloister.types.config import MAX_UNIT_MEMBERS
from cloister.types.errors import ConfigError
from cloister.types.logs import describe

MAX_UNPROVED: Final = 32
"""Maximum number of unauthenticated connections to a member's unit port; a further one replaces the oldest."""
LAST_WORDS_S: Final = 1.0
SAY_EVERY_S: Final = 5.0
"""Minimum interval between two log lines of a member about refused leaders."""
MARGIN_BYTES: Final = 4096
"""Allowance for a longer next statement, for example with more witnesses in the log's checkpoint."""
LISTED_BYTES: Final = 128
"""Size of a member's digest and name in statement and evidence, in addition to its document."""
NO_UNIT: Final = "protocol"
"""Reason of a refusal if the other side does not speak the unit protocol."""
_OF_MEMBERS: Final = frozenset(member_extra(number) for number in range(1, MAX_UNIT_MEMBERS + 1))
_LENGTH: Final = struct.Struct(">I")
_TAG_BYTES: Final = 16

_logger = logging.getLogger(__name__)


class _NotReachedError(OSError):
    """The connection attempt timed out."""


@dataclass(frozen=True)
class UnitTimes:
    """Timeouts and intervals in seconds.

    Attributes:
        connect_s, handshake_s: timeouts of a connection attempt, and of a whole handshake with its verifications.
        ping_s: interval of the leader's messages to a member, with which both exchange new evidence.
        silent_s: timeout for the other side's next message, after which it is lost.
        retry_s: delay before a leader retries a member.
        listed_s: minimum remaining validity of a listed member's evidence. Members renew evidence that has 15 minutes left. So
            a lost member may return until then, and one that does not renew does not shorten the node's own evidence.
    """

    connect_s: float = 5.0
    handshake_s: float = 20.0
    ping_s: float = 10.0
    silent_s: float = 30.0
    retry_s: float = 2.0
    listed_s: float = 780.0


@dataclass(frozen=True)
class UnitListing:
    """The unit's entries in a node's next statement.

    Attributes:
        members: see `Statement.unit_members`.
        documents: the members' evidence, which clients get with the node's.
        ends_s: earliest expiry of the members' evidence, Unix seconds; None without members. The statement may not outlive it.
    """

    members: tuple[str, ...] = ()
    documents: tuple[bytes, ...] = ()
    ends_s: int | None = None


class UnitSide(Protocol):
    """A node's role in its unit, as needed for its statements.

    Attributes:
        key: the node's unit key.
    """

    key: UnitKey

    def list_members(self) -> UnitListing:
        """Returns the unit's entries in the next statement."""

    def take_evidence(self, document: bytes) -> None:
        """Sets the node's new evidence, which is sent to other machines from now on."""


# -- the leader


@dataclass
class _Member:
    """The leader's view of a member.

    Attributes:
        document, statement: its verified evidence; empty and None before.
        pair: set while a connection is authenticated on both sides.
        is_used: whether workers can use its engines.
        withdrawn: why workers can no longer use its engines: the connection then ends, and the next one makes a new pair. Empty
            if they can, or never could.
        excess: why the next statement omits it although its evidence is valid; empty if it is listed.
    """

    index: int
    address: tuple[str, int]
    document: bytes = b""
    statement: Statement | None = None
    pair: Pair | None = None
    is_used: bool = False
    withdrawn: str = ""
    excess: str = ""
    last_word: str = ""

    @property
    def digest(self) -> str:
        return digest_of(self.statement.unit_key) if self.statement is not None else ""


@dataclass(frozen=True)
class _Stated:
    """An earlier or current statement of this node.

    Attributes:
        keys: the keys that it names.
        members: digests of the members that it lists.
        opens_until_s: latest expiry of its keys, Unix seconds. Until then they open requests even if the statement has expired:
            an attacker may have delayed the request.
    """

    keys: bytes
    members: frozenset[str]
    opens_until_s: float


class UnitLeader:
    """The leader's side: connects to the members at their addresses, and uses those that authenticate.

    Args:
        addresses: unit ports of the members, (IP address, port).
        verifier: verifies their evidence.
        num_engines: engines of this machine, and so of every machine.
        longest_request_s: maximum duration of a request: how long after the expiry of its key it may still need an engine.
        on_pair: called when a member becomes usable. If it raises OSError, the pair is dropped and made again later.
        on_lost: called with the id of a pair whose member is no longer usable, even if `on_pair` failed for it.
        now: returns Unix seconds.
    """

    def __init__(
        self,
        key: UnitKey,
        addresses: Sequence[tuple[str, int]],
        verifier: PeerVerifier,
        num_engines: int,
        *,
        longest_request_s: float,
        on_pair: Callable[[Pair], None],
        on_lost: Callable[[bytes], None],
        now: Callable[[], float] = time.time,
        times: UnitTimes = UnitTimes(),
    ) -> None:
        self.key = key
        self._members = [_Member(index, address) for index, address in enumerate(addresses, 1)]
        self._verifier = verifier
        self._num_engines = num_engines
        self._late_s = MAX_CLOCK_SKEW_S + longest_request_s  # keys expire by a clock that is never set, unlike this one
        self._on_pair, self._on_lost = on_pair, on_lost
        self._now = now
        self._times = times
        self._document = b""
        self._own = verifier.own
        self._stated: list[_Stated] = []

    async def start(self, deadline_s: float) -> None:
        """Waits until the evidence of every member is accepted, so that the first statement lists all of them. Retries members
        that do not answer or have no evidence yet.

        Args:
            deadline_s: time of the event loop's clock.

        Raises:
            UnitRefusedError: a member's evidence is refused, a member does not answer in time, or the total evidence is longer
                than clients read.
        """
        await asyncio.gather(*(self._look(member, deadline_s) for member in self._members))
        if (why := self._find_excess(self._members)) is not None:
            raise UnitRefusedError("size", why)

    def list_members(self) -> UnitListing:
        """See `UnitSide.list_members`."""
        listed: list[_Member] = []
        for member in filter(self._is_listed, self._members):
            why = self._find_excess([*listed, member])
            member.excess = "" if why is None else f"{why}; it is left out"
            if why is None:
                listed.append(member)
        ends_s = min((member.statement.not_after for member in listed if member.statement is not None), default=None)
        documents = tuple(member.document for member in listed)
        return UnitListing(tuple(sorted(member.digest for member in listed)), documents, ends_s)

    def take_evidence(self, document: bytes) -> None:
        """See `UnitSide.take_evidence`."""
        evidence = read_evidence(document)
        statement = read_statement(evidence.statement)
        self._document, self._own = document, evidence
        now_s = self._now()
        self._stated = [one for one in self._stated if one.opens_until_s > now_s - self._late_s]
        of_key = (one.opens_until_s for one in self._stated if one.keys == statement.keys)
        # New keys were drawn before now, so this bounds their expiry. `not_before` may be much earlier, if no evidence was made
        # meanwhile.
        opens_until_s = next(of_key, max(now_s + NODE_KEY_LIFE_S, statement.not_after))
        self._stated.append(_Stated(statement.keys, frozenset(statement.unit_members), opens_until_s))
        self._use_members()

    async def run(self) -> None:
        """Connects to every member and stays connected until cancelled."""
        async with asyncio.TaskGroup() as group:
            for member in self._members:
                group.create_task(self._keep(member))

    def _find_excess(self, members: Sequence[_Member]) -> str | None:
        """Returns why the evidence of this node and these members, in base64, exceeds what clients read; None if it does not.
        This is an estimate: statements of one configuration have similar lengths, as have certificates of one vendor."""
        own = msgspec.structs.replace(self._own, extra={n: v for n, v in self._own.extra.items() if n not in _OF_MEMBERS})
        statements = [own.statement, *(read_evidence(member.document).statement for member in members)]
        parts = [*(member.document for member in members), max(statements, key=len)]
        size = len(msgspec.structs.replace(own, statement=b"").encode()) + sum(4 * (len(part) // 3 + 1) for part in parts)
        size += MARGIN_BYTES + LISTED_BYTES * len(members)
        num_extras = len(own.extra) + len(members)
        if size <= MAX_EVIDENCE_BYTES and num_extras <= MAX_EXTRAS:
            return None
        return (
            f"the evidence of this node and {len(members)} members has {size} bytes and {num_extras} parts, and clients read "
            f"at most {MAX_EVIDENCE_BYTES} and {MAX_EXTRAS}; name fewer members in --unit-members"
        )

    def _is_listed(self, member: _Member) -> bool:
        return member.statement is not None and member.statement.not_after - self._now() > self._times.listed_s

    def _may_use(self, member: _Member) -> bool:
        ended_s = self._now() - self._late_s  # plus the duration of requests that the keys opened
        valid = [one.members for one in self._stated if one.opens_until_s > ended_s]
        return bool(valid) and all(member.digest in members for members in valid)

    def _use_members(self) -> None:
        for member in self._members:
            may_use = self._may_use(member)
            if member.pair is not None and may_use and not member.is_used and not member.withdrawn:
                member.is_used = True
                try:
                    self._on_pair(member.pair)
                except OSError as error:  # out of descriptors; the node's evidence is renewed regardless
                    self._withdraw(member, f"this node cannot reach its engines ({error.strerror or type(error).__name__})")
            elif member.pair is not None and member.is_used and not may_use:
                self._withdraw(member, member.excess or "it does not renew its evidence; its log says why")

    def _withdraw(self, member: _Member, why: str) -> None:
        assert member.pair is not None, "it was used"
        member.is_used, member.withdrawn = False, why
        self._on_lost(member.pair.id)

    async def _look(self, member: _Member, deadline_s: float) -> None:
        """Fetches a member's evidence for the first statement."""
        while True:
            try:
                async with asyncio.timeout(self._times.handshake_s):
                    reader, writer = await self._connect(member)
                    try:
                        await self._ask(member, LeaderHandshake(self.key), reader, writer)
                    finally:
                        await _end(writer)
                return
            except (OSError, EOFError, TimeoutError, UnitRefusedError) as error:
                why = self._describe_first(member, error)
                is_final = isinstance(error, UnitRefusedError) and error.reason != REFUSED
                if is_final or asyncio.get_running_loop().time() + self._times.retry_s > deadline_s:
                    reason = error.reason if isinstance(error, UnitRefusedError) else "silent"
                    raise UnitRefusedError(reason, f"member {member.index} of the unit, {_show(member)}: {why}") from None
                self._say(member, why)
            await asyncio.sleep(self._times.retry_s)

    async def _keep(self, member: _Member) -> None:
        while True:
            try:
                await self._stay(member)
            except (OSError, EOFError, TimeoutError, UnitRefusedError) as error:
                self._say(member, _describe(error))
            except Exception as error:  # a bug must end neither the other members nor the node
                self._say(member, describe(error))
            await asyncio.sleep(self._times.retry_s)

    async def _stay(self, member: _Member) -> None:
        """Runs one connection: pairs, and exchanges new evidence until either side is lost or refused."""
        reader, writer = await self._connect(member)
        try:
            async with asyncio.timeout(self._times.handshake_s):
                handshake = LeaderHandshake(self.key)
                statement = await self._ask(member, handshake, reader, writer)
                document = self._document
                if not document:
                    return  # the first statement is being made, or the log says why not
                if member.digest not in read_statement(read_evidence(document).statement).unit_members:
                    coming = "this node's statement does not list it; the next one will, unless the log says why not"
                    self._say(member, member.excess or coming)
                    return
                writer.write(_frame(handshake.claim(statement.unit_key, member.index, document)))
                agreed = handshake.finish(await _read_frame(reader, MAX_HELLO_BYTES))
                if member.digest != digest_of(statement.unit_key):
                    raise UnitRefusedError("twice", "the member answered at another address meanwhile")
            records = SealedRecords(self.key.memory, agreed, is_leader=True)
            try:
                member.pair = Pair(agreed.id, agreed.secret, member.address, member.index, self._num_engines)
                later = (
                    ""
                    if self._may_use(member)
                    else "; it is used when the keys of statements that do not list it have ended, and the requests under them"
                )
                _logger.info("member %d of the unit has proved itself%s", member.index, later)
                member.last_word = ""
                await self._exchange(member, records, document, reader, writer)
            finally:
                records.close()
                self._drop(member)
        finally:
            await _end(writer)

    async def _exchange(
        self, member: _Member, records: SealedRecords, shown: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert member.statement is not None
        while True:
            self._use_members()
            news = self._document if self._document != shown else b""
            shown = self._document
            writer.write(_frame(records.seal(news)))
            async with asyncio.timeout(self._times.silent_s):
                await writer.drain()
                document = records.open(await _read_frame(reader, MAX_FRAME_BYTES + _TAG_BYTES))
            if document:
                await self._renew(member, document)
            if member.withdrawn:
                raise UnitRefusedError("withdrawn", f"the member is dropped: {member.withdrawn}")
            if member.statement.not_after <= self._now():
                raise UnitRefusedError("expiry", "the member is dropped: it does not renew its evidence; its log says why")
            await asyncio.sleep(self._times.ping_s)

    def _drop(self, member: _Member) -> None:
        pair, member.pair = member.pair, None
        was_used, member.is_used, member.withdrawn = member.is_used, False, ""
        if pair is not None and was_used:
            self._on_lost(pair.id)

    async def _connect(self, member: _Member) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = member.address
        try:
            async with asyncio.timeout(self._times.connect_s):
                reader, writer = await asyncio.open_connection(host, port)
        except TimeoutError:
            raise _NotReachedError(errno.ETIMEDOUT, f"nothing answers within {self._times.connect_s:g} s") from None
        writer.write(JOIN)
        return reader, writer

    async def _ask(
        self, member: _Member, handshake: LeaderHandshake, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Statement:
        """Exchanges hello and offer, and verifies the member's evidence; returns its statement."""
        writer.write(_frame(handshake.hello))
        document = handshake.read_offer(await _read_frame(reader, MAX_FRAME_BYTES))
        statement = await asyncio.to_thread(self._verifier.judge_member, document, self._now())
        handshake.check_offer(statement.unit_key)
        self._take(member, document, statement)
        return statement

    async def _renew(self, member: _Member, document: bytes) -> None:
        """Verifies new evidence of an authenticated member."""
        statement = await asyncio.to_thread(self._verifier.judge_member, document, self._now())
        if digest_of(statement.unit_key) != member.digest:
            raise UnitRefusedError("handshake", "the member is dropped: its new evidence names another key")
        self._take(member, document, statement)

    def _take(self, member: _Member, document: bytes, statement: Statement) -> None:
        for other in self._members:
            if other is member or other.digest != digest_of(statement.unit_key):
                continue
            if other.pair is not None or not self._document:
                raise UnitRefusedError("twice", "the member is named twice; name each member once in --unit-members")
            # The member has moved to this address. The one that was here stays listed, like any lost member, and may have moved
            # to the other address.
            other.document, other.statement = member.document, member.statement
        member.document, member.statement = document, statement

    def _describe_first(self, member: _Member, error: BaseException) -> str:
        """Describes a failure of a member that was never reached, so that its address may be wrong."""
        _, port = member.address
        check = f"is {port} what its --unit-port says? Another program may listen there"
        if isinstance(error, ConnectionRefusedError):
            return f"the connection is refused: nothing listens there; start it with --unit-port {port}, or correct the address"
        if isinstance(error, TimeoutError) and not isinstance(error, _NotReachedError):
            limit_s = self._times.handshake_s
            return f"it takes the connection and says nothing for {limit_s:g} s: it loads its model, or {check}"
        if isinstance(error, EOFError | ConnectionResetError):
            return f"it takes the connection and ends it without an answer: {check}"
        if isinstance(error, OSError):
            why = error.strerror or type(error).__name__
            return f"it cannot be reached ({why}); correct its address in --unit-members, or let this node connect to that port"
        if isinstance(error, UnitRefusedError) and error.reason == NO_UNIT:
            return f"it answers in another protocol: {check}"
        return _describe(error)

    def _say(self, member: _Member, why: str) -> None:
        """Logs why a member is not used; a repeated reason is logged once."""
        if why != member.last_word:
            _logger.warning("member %d of the unit, %s, is not used: %s", member.index, _show(member), why)
        member.last_word = why


# -- a member


@dataclass
class _Session:
    """A member's connection with its leader."""

    pair: Pair
    leader_key: bytes
    task: asyncio.Task[None]


class UnitPort:
    """A member's side: the port at which its leader authenticates, and to which it forwards connections to engines.

    Args:
        verifier: verifies the leader's evidence.
        num_engines: engines of this machine, and so of every machine.
        carry: called with a connection whose first byte was `CARRY`, and that byte. It returns once it has authenticated the
            peer, and then owns the connection. If it fails, or exceeds the time of a handshake and is cancelled, the connection
            is closed here.
        on_leader: called when a leader has authenticated. If it raises OSError, the leader is refused, and may retry.
        on_leader_lost: called with the id of a pair whose leader is lost, even if `on_leader` failed for it; everything of the
            pair must end.
        now: returns Unix seconds.
    """

    def __init__(
        self,
        key: UnitKey,
        verifier: PeerVerifier,
        num_engines: int,
        *,
        carry: Callable[[socket.socket, bytes], Awaitable[None]],
        on_leader: Callable[[Pair], None],
        on_leader_lost: Callable[[bytes], None],
        now: Callable[[], float] = time.time,
        times: UnitTimes = UnitTimes(),
    ) -> None:
        self.key = key
        self._verifier = verifier
        self._num_engines = num_engines
        self._carry = carry
        self._on_leader, self._on_leader_lost = on_leader, on_leader_lost
        self._now = now
        self._times = times
        self._document = b""
        self._session: _Session | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._unproved: dict[asyncio.Task[None], None] = {}
        self._judging = asyncio.Lock()
        self._last_word, self._said_s = "", float("-inf")

    def list_members(self) -> UnitListing:
        """See `UnitSide.list_members`. A member lists none."""
        return UnitListing()

    def take_evidence(self, document: bytes) -> None:
        """See `UnitSide.take_evidence`."""
        self._document = document

    async def run(self, listener: socket.socket) -> None:
        """Answers connections until cancelled.

        Args:
            listener: a bound, listening socket (`listen_for_leader`); it is closed here.
        """
        listener.setblocking(False)
        try:
            while True:
                await wait_readable(listener)  # accept one per turn of the loop, so that cancelled ones are closed in between
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:  # the peer has gone meanwhile
                    continue
                except OSError:  # out of descriptors, or the peer has gone
                    await asyncio.sleep(self._times.retry_s)
                    continue
                if len(self._unproved) >= MAX_UNPROVED:
                    oldest = next(iter(self._unproved))
                    del self._unproved[oldest]
                    oldest.cancel()
                task = asyncio.create_task(self._answer(sock))
                self._tasks[task] = self._unproved[task] = None
                task.add_done_callback(partial(self._forget, sock))
        finally:
            listener.close()
            for task in list(self._tasks):
                task.cancel()

    def _forget(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._unproved.pop(task, None)
        if task.cancelled():  # possibly before it started
            sock.close()

    async def _answer(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        is_taken = False
        try:
            async with asyncio.timeout(self._times.handshake_s) as limit:
                first = await asyncio.get_running_loop().sock_recv(sock, 1)
                if first == CARRY:
                    await self._carry(sock, first)
                    is_taken = True
                elif first == JOIN:
                    is_taken = True
                    await self._join(sock, limit)
        except UnitRefusedError as error:
            self._say(error.message)
        except (OSError, EOFError, TimeoutError):
            pass  # a leader that only fetched evidence, or a stranger
        finally:
            if not is_taken:
                sock.close()

    async def _join(self, sock: socket.socket, limit: asyncio.Timeout) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            try:
                pair, statement, records, answer = await self._shake_hands(reader, writer)
            except UnitRefusedError as error:
                writer.write(_frame(encode_refusal(error.message)))
                await writer.drain()
                raise
            except asyncio.CancelledError:
                writer.transport.abort()  # replaced by another connection: close at once
                raise
            task = asyncio.current_task()
            assert task is not None
            self._unproved.pop(task, None)
            limit.reschedule(None)
            await self._serve(_Session(pair, statement.unit_key, task), statement, records, answer, reader, writer)
        finally:
            await _end(writer)

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Pair, Statement, SealedRecords, bytes]:
        hello = await _read_frame(reader, MAX_HELLO_BYTES)
        if not self._document:
            raise UnitRefusedError("evidence", "this node has no evidence yet")
        handshake = MemberHandshake(self.key, self._document)
        writer.write(_frame(handshake.offer(hello)))
        index, document = handshake.read_claim(await _read_frame(reader, MAX_FRAME_BYTES))
        answer, agreed = handshake.accept(read_leader_key(document))  # first, as evidence is public
        async with self._judging:  # one at a time
            statement = await asyncio.to_thread(self._verifier.judge_leader, document, self.key.public, self._now())
        if self._session is not None and self._session.leader_key != statement.unit_key:
            raise UnitRefusedError(
                "has-leader", "this member has a leader, and serves one at a time; stop that one, or name another member"
            )
        records = SealedRecords(self.key.memory, agreed, is_leader=False)
        return Pair(agreed.id, agreed.secret, None, index, self._num_engines), statement, records, answer

    async def _serve(
        self,
        session: _Session,
        statement: Statement,
        records: SealedRecords,
        answer: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Exchanges new evidence with an authenticated leader until it is lost or refused. Ends an earlier connection of the
        same leader, which must have lost it."""
        try:
            if self._session is not None:
                earlier, self._session = self._session, None
                earlier.task.cancel()
                self._on_leader_lost(earlier.pair.id)
            self._session = session
            try:
                self._on_leader(session.pair)
            except OSError as error:  # out of descriptors
                why = f"this member cannot serve a leader now ({error.strerror or type(error).__name__})"
                writer.write(_frame(encode_refusal(why)))
                raise UnitRefusedError("files", why) from None
            _logger.info("the leader of the unit has proved itself")
            self._last_word = ""
            shown = self._document
            writer.write(_frame(answer))
            while True:
                async with asyncio.timeout(self._times.silent_s):
                    await writer.drain()
                    document = records.open(await _read_frame(reader, MAX_FRAME_BYTES + _TAG_BYTES))
                if document:
                    renewed = await asyncio.to_thread(self._verifier.judge_leader, document, self.key.public, self._now())
                    if renewed.unit_key != session.leader_key:
                        raise UnitRefusedError("handshake", "the leader is dropped: its new evidence names another key")
                    statement = renewed
                if statement.not_after <= self._now():
                    raise UnitRefusedError("expiry", "the leader is dropped: its evidence has ended, and it has shown no other")
                news = self._document if self._document != shown else b""
                shown = self._document
                writer.write(_frame(records.seal(news)))
        finally:
            records.close()
            if self._session is session:
                self._session = None
                self._on_leader_lost(session.pair.id)

    def _say(self, why: str) -> None:
        """Logs why a leader was refused: a repeated reason once, and at a limited rate, as anyone may connect."""
        now_s = asyncio.get_running_loop().time()
        if why != self._last_word and now_s - self._said_s >= SAY_EVERY_S:
            _logger.warning("the unit port: %s", why)
            self._last_word, self._said_s = why, now_s


def listen_for_leader(host: str, port: int) -> socket.socket:
    """Returns the listening socket of a unit port.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MAX_UNPROVED)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}); set unit_port to a free port", param="unit_port"
        ) from None


def _frame(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


async def _read_frame(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > most_bytes:
        raise UnitRefusedError(NO_UNIT, f"a message of {size} bytes is none of a unit's")
    return await reader.readexactly(size)


async def _end(writer: asyncio.StreamWriter) -> None:
    """Closes a connection, after a short wait for its last data to be sent."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LAST_WORDS_S):
            await writer.wait_closed()
    writer.transport.abort()


def _describe(error: BaseException) -> str:
    if isinstance(error, UnitRefusedError):
        return error.message
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, EOFError):
        return "it ended the connection"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there; start it with --unit-port"
    return f"it cannot be reached ({getattr(error, 'strerror', None) or type(error).__name__})"


def _show(member: _Member) -> str:
    host, port = member.address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
