"""The machines of a sealed unit find each other: the leader connects to its members, both sides verify each other's evidence,
and again whenever it is renewed; a machine that does not come up to it, or is silent, is dropped.

A member is usable for the leader's workers only if every statement of the leader that a request may still run under lists it: a
client that sealed to the leader under an older statement agreed to the machines in that one. Such a request may come until the
key of that statement ends, which is later than the statement where a member's evidence ended first.
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
"""Most connections to a member's unit port that have proved nothing yet; a further one takes the place of the oldest."""
LAST_WORDS_S: Final = 1.0
SAY_EVERY_S: Final = 5.0
"""Least time between two lines about refused leaders in a member's log."""
MARGIN_BYTES: Final = 4096
"""What a node's next statement may be longer than those that it knows: the log's checkpoint has more witnesses, say."""
LISTED_BYTES: Final = 128
"""What a statement and evidence have for each member besides its document: a digest, and a name."""
NO_UNIT: Final = "protocol"
"""The reason if what comes is no message of a unit."""
_OF_MEMBERS: Final = frozenset(member_extra(number) for number in range(1, MAX_UNIT_MEMBERS + 1))
_LENGTH: Final = struct.Struct(">I")
_TAG_BYTES: Final = 16

_logger = logging.getLogger(__name__)


class _NotReachedError(OSError):
    """Nothing answers at an address."""


@dataclass(frozen=True)
class UnitTimes:
    """Seconds.

    Attributes:
        connect_s, handshake_s: limits on a connection, and on all of a handshake with its verifications.
        ping_s: between two messages of a leader to a member, which bring news of either's evidence.
        silent_s: limit on the wait for the other side's next message; then it is lost.
        retry_s: until a leader tries a member again.
        listed_s: a member is listed while its evidence has more than this left. It renews evidence that has 15 minutes left; if
            it is lost, it may come back until then, and if it does not renew, the node's own evidence does not end with it.
    """

    connect_s: float = 5.0
    handshake_s: float = 20.0
    ping_s: float = 10.0
    silent_s: float = 30.0
    retry_s: float = 2.0
    listed_s: float = 780.0


@dataclass(frozen=True)
class UnitListing:
    """What a node's next statement says about its unit.

    Attributes:
        members: see `Statement.unit_members`.
        documents: the evidence of these, which clients get with the node's.
        ends_s: when the first of these ends, Unix seconds; None without members. No statement that lists them may end later.
    """

    members: tuple[str, ...] = ()
    documents: tuple[bytes, ...] = ()
    ends_s: int | None = None


class UnitSide(Protocol):
    """A node's part in its unit, as what makes its statements sees it.

    Attributes:
        key: the node's unit key.
    """

    key: UnitKey

    def list_members(self) -> UnitListing:
        """Returns what the next statement says."""

    def take_evidence(self, document: bytes) -> None:
        """Takes the node's new evidence, which is shown to other machines from now on."""


# -- the leader


@dataclass
class _Member:
    """A member, as its leader knows it.

    Attributes:
        document, statement: its verified evidence; None before.
        pair: while both have proved themselves on a connection that lives.
        is_used: whether its engines were handed to workers.
        withdrawn: why they are not any more: the connection ends, and the next one has a pair of its own. Empty: they are, or
            never were.
        excess: why the next statement does not list it, though its evidence is good. Empty: it does.
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
    """A statement of this node.

    Attributes:
        keys: those that it names.
        members: digests of the members that it lists.
        opens_until_s: by then its keys have ended. Until they end they open what was sealed to them, also if the statement has
            ended: somebody may have held the request meanwhile.
    """

    keys: bytes
    members: frozenset[str]
    opens_until_s: float


class UnitLeader:
    """The leader's side: it knows its members by their addresses, and uses each that proves itself.

    Args:
        addresses: unit ports of the members, (IP address, port).
        verifier: judges their evidence.
        num_engines: engines of this machine, and so of each.
        longest_request_s: for how long a request runs at most: so much later than the key that opened it, it may still be given
            to an engine.
        on_pair: called when a member has become usable. If it raises OSError, the pair is lost, and made again later.
        on_lost: called with the id of a pair whose member is not usable any more, also if `on_pair` failed for it.
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
        self._late_s = MAX_CLOCK_SKEW_S + longest_request_s  # this clock may be set by a little, and that of the keys is not
        self._on_pair, self._on_lost = on_pair, on_lost
        self._now = now
        self._times = times
        self._document = b""
        self._own = verifier.own
        self._stated: list[_Stated] = []

    async def start(self, deadline_s: float) -> None:
        """Waits until each member has shown evidence that is accepted, so that the first statement lists all of them. A member
        that does not answer, or has no evidence yet, is asked again.

        Args:
            deadline_s: on the clock of the event loop.

        Raises:
            UnitRefusedError: the evidence of one is refused, it does not answer in time, or the evidence of all is longer than
                clients read.
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
        # Keys that are new here were drawn before. `not_before` may be long before that, if no evidence came meanwhile.
        opens_until_s = next(of_key, max(now_s + NODE_KEY_LIFE_S, statement.not_after))
        self._stated.append(_Stated(statement.keys, frozenset(statement.unit_members), opens_until_s))
        self._use_members()

    async def run(self) -> None:
        """Connects to each member, and stays connected, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for member in self._members:
                group.create_task(self._keep(member))

    def _find_excess(self, members: Sequence[_Member]) -> str | None:
        """Returns why this node's evidence with that of these members, in base64, is more than clients read; None if it is not.
        Statements of one configuration have about one length, and certificates of one maker."""
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
        ended_s = self._now() - self._late_s  # with the requests that its keys opened
        valid = [one.members for one in self._stated if one.opens_until_s > ended_s]
        return bool(valid) and all(member.digest in members for members in valid)

    def _use_members(self) -> None:
        for member in self._members:
            may_use = self._may_use(member)
            if member.pair is not None and may_use and not member.is_used and not member.withdrawn:
                member.is_used = True
                try:
                    self._on_pair(member.pair)
                except OSError as error:  # no descriptors are left; the node's evidence is renewed all the same
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
            except Exception as error:  # an error in the program: it ends neither the other members nor the node
                self._say(member, describe(error))
            await asyncio.sleep(self._times.retry_s)

    async def _stay(self, member: _Member) -> None:
        """One connection: pairs, and exchanges news until either side is lost or refused."""
        reader, writer = await self._connect(member)
        try:
            async with asyncio.timeout(self._times.handshake_s):
                handshake = LeaderHandshake(self.key)
                statement = await self._ask(member, handshake, reader, writer)
                document = self._document
                if not document:
                    return  # the first statement is made now, or the log says why not
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
        """Exchanges hello and offer, and takes the member's evidence; returns its statement."""
        writer.write(_frame(handshake.hello))
        document = handshake.read_offer(await _read_frame(reader, MAX_FRAME_BYTES))
        statement = await asyncio.to_thread(self._verifier.judge_member, document, self._now())
        handshake.check_offer(statement.unit_key)
        self._take(member, document, statement)
        return statement

    async def _renew(self, member: _Member, document: bytes) -> None:
        """Verifies new evidence of a member that has proved itself."""
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
            # it has moved to this address; the one that was here is listed on, as one that is lost is, and may be there now
            other.document, other.statement = member.document, member.statement
        member.document, member.statement = document, statement

    def _describe_first(self, member: _Member, error: BaseException) -> str:
        """Returns why a member that has never been reached is not: its address may be wrong."""
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
        """Logs why a member is not used, once for each reason."""
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
    """A member's side: its port, at which its leader proves itself, and over which connections to its engines come.

    Args:
        verifier: judges the leader's evidence.
        num_engines: engines of this machine, and so of each.
        carry: takes a connection over whose first byte was `CARRY`, and that byte. It returns when it has verified who is at
            the other end; the connection is then its own. If it fails, or is cancelled because it takes longer than a handshake
            may, the connection is closed here.
        on_leader: called when a leader has proved itself. If it raises OSError, that one is refused, and may come again.
        on_leader_lost: called with the id of a pair whose leader is lost, also if `on_leader` failed for it; nothing more may
            be done for it.
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
        """See `UnitSide.list_members`: a member has none."""
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
                await wait_readable(listener)  # in each turn of the loop one: those that were ended are closed in between
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:  # it has gone meanwhile
                    continue
                except OSError:  # no descriptors are left, or the caller has gone
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
        if task.cancelled():  # perhaps before it began
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
            pass  # a leader that only looked, or somebody else
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
                writer.transport.abort()  # its place was given to another one: no last words
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
        answer, agreed = handshake.accept(read_leader_key(document))  # before the rest: anybody can have evidence of others
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
        """Exchanges news with a leader that has proved itself, until it is lost or refused. An earlier connection of the same
        leader ends: it lost that one."""
        try:
            if self._session is not None:
                earlier, self._session = self._session, None
                earlier.task.cancel()
                self._on_leader_lost(earlier.pair.id)
            self._session = session
            try:
                self._on_leader(session.pair)
            except OSError as error:  # no descriptors are left
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
        """Logs why a leader was refused; once for each reason, and no faster than anybody who reaches the port could want."""
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
    """Closes a connection, with a moment for what was written last."""
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
