"""Builds the next epoch, logs it, has it cosigned, and serves it as the one file that every client gets.

It is part of the gateway. It never serves an epoch that clients would refuse: with too few cosignatures, or a release that was
revoked or never logged, the new epoch is not published, and the previous one stays until it ends. Nodes with another release
are omitted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cloister.trust.attestation.evidence import read_evidence, read_statement
from cloister.trust.transparency.epoch import (
    MAX_EPOCH_S,
    Epoch,
    EpochBundle,
    GatewayEntry,
    IssuerEntry,
    NodeEntry,
    build_epoch,
    encode_bundle,
    epoch_leaf,
)
from cloister.trust.transparency.history import History
from cloister.trust.transparency.log import Appended, Log
from cloister.trust.transparency.membership import Membership, check_members, find_member
from cloister.trust.transparency.note import Note, Signature
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.release import Release
from cloister.trust.transparency.trust import Trust
from cloister.trust.transparency.witness import OlderLogError, SplitViewError
from cloister.types.errors import CloisterError

MIN_EPOCH_S = 60
"""A node whose keys expire sooner is omitted: clients could hardly fetch the list in time."""


WAIT_S = 120
"""Timeout for witnesses, after which a new epoch replaces the waiting one: clients refuse epochs that were cosigned long after
their start (`client.limits.LATE_S`), which could have been made for one client."""


class Cosigner(Protocol):
    """A witness, over any transport."""

    async def cosign(self, log: Log, note: Note) -> Sequence[Signature]:
        """Returns its cosignatures on a checkpoint of the log.

        Raises:
            CloisterError: it refused, or did not answer before its deadline.
        """


@dataclass(frozen=True)
class Contents:
    """The gateway's data for an epoch.

    Attributes:
        gateway: its own URL and keys.
        issuers: issuers whose tokens it accepts.
        evidence: the evidence document of each reachable node.
        release: digest of the release that nodes must run.
        profile: name of the profile that they must run under.
    """

    gateway: GatewayEntry
    issuers: tuple[IssuerEntry, ...]
    evidence: tuple[bytes, ...]
    release: str
    profile: str


@dataclass(frozen=True)
class Published:
    """A new epoch.

    Attributes:
        bundle: the served bytes of `EpochBundle`.
        epoch: its epoch.
        evidence: the evidence documents of its nodes by SHA-256 in hex.
        left_out: why documents were omitted, for the operator; one line each.
    """

    bundle: bytes
    epoch: Epoch
    evidence: dict[str, bytes]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Waiting:
    """An epoch that is logged but not cosigned yet."""

    contents: Contents
    epoch: Epoch
    appended: Appended


class Publisher:
    """Writes epochs to a log."""

    def __init__(
        self,
        log: Log,
        trust: Trust,
        cosigners: Iterable[Cosigner],
        before_epoch: Callable[[int], None] | None = None,
        *,
        keeps_pace: bool = False,
    ) -> None:
        """
        Args:
            log: the log, with its key.
            trust: the clients' trust anchors; an epoch that they would refuse is not published.
            cosigners: the witnesses, queried concurrently.
            before_epoch: called with the number of the next epoch before it is logged, in a thread; nothing is logged if it
                raises a `CloisterError`.
            keeps_pace: logs no epoch that clients would refuse because epochs, or the gateway's keys, change too fast. False
                is for logs that clients are tried with.
        """
        self._before_epoch = before_epoch
        self._keeps_pace = keeps_pace
        self._is_confirmed = False
        self._log = log
        self._trust = trust
        self._cosigners = tuple(cosigners)
        self._history = History(log, trust.releases)
        self._turn = asyncio.Lock()
        self._waiting: _Waiting | None = None
        self._size = 0

    def has_grown(self) -> bool:
        """Whether an entry was logged since the last epoch: a release, a revocation, or an epoch that waits for witnesses."""
        return self._log.checkpoint()[0].size != self._size

    def has_new_members(self, now: float) -> bool:
        """Whether the valid membership has changed since the last epoch began."""
        return self._history.roll_at(now).current != self._history.roll.current

    def find_signer(self, evidence: bytes, now: float) -> tuple[str, str] | None:
        """Returns the node_id that evidence is for, and the name of the member that signed it; None if no member of the
        valid membership did, or the log was not read yet."""
        membership = self._history.roll_at(now).current
        if membership is None:
            return None
        try:
            document = read_evidence(evidence)
            statement = read_statement(document.statement)
        except CloisterError:
            return None
        member = find_member(membership, document)
        return None if member is None else (statement.node_id, member.name)

    async def publish(self, contents: Contents, now: float, lifetime_s: int = MAX_EPOCH_S) -> Published:
        """Publishes the next epoch, which is valid from `now` on.

        Args:
            contents: its content.
            now: Unix time in seconds.
            lifetime_s: maximum validity; it ends earlier if a node's keys do.

        Raises:
            TransparencyError: clients would refuse it; the message says why.
            ConfigError: the log cannot be written.
        """
        async with self._turn:
            if not self._is_confirmed:
                await confirm(self._log, self._cosigners, self._trust.threshold)
                self._is_confirmed = True
            self._history.advance(self._log.checkpoint()[0].size)
            release = self._history.release(contents.release)
            membership = self._history.roll_at(now).current
            nodes, evidence, left_out = select_nodes(contents, release, membership, now)
            waiting = self._waiting
            if waiting is None or not self._still_serves(waiting, contents, now):
                until = min(int(now) + min(lifetime_s, MAX_EPOCH_S), *(until for _, until in nodes))
                waiting = await self._append(contents, [node for node, _ in nodes], int(now), until)
            self._waiting = waiting  # reuse it until it is cosigned: an unreachable witness must not fill the log with epochs
            epoch, appended = waiting.epoch, waiting.appended
            check_members(epoch, membership)
            note = await self._gather_cosignatures(appended.note, now)
            self._log.cosigned(note)
            self._waiting = None
            self._history.advance(appended.checkpoint.size)
            self._size = appended.checkpoint.size
            bundle = EpochBundle(
                checkpoint=str(note),
                epoch=epoch,
                index=appended.first,
                proof=self._log.prove_inclusion(appended.first, appended.checkpoint.size),
                release=self._history.logged_release(contents.release),
                minimum=self._history.logged_minimum(),
            )
            return Published(encode_bundle(bundle), epoch, evidence, tuple(left_out))

    async def _append(self, contents: Contents, nodes: list[NodeEntry], begin: int, until: int) -> _Waiting:
        epoch = self._build(contents, nodes, begin, until)
        if self._keeps_pace and (excess := self._history.pace.after(epoch).excess):
            raise TransparencyError(
                Reason.TOO_FAST,
                f"clients would refuse it: {excess}. It follows by itself when they would not; until then do not restart the "
                "gateway, which would change its keys again",
            )
        if self._before_epoch is not None:
            await asyncio.to_thread(self._before_epoch, epoch.epoch)
        return _Waiting(contents, epoch, await asyncio.to_thread(self._log.append, [epoch_leaf(epoch)]))

    def _build(self, contents: Contents, nodes: list[NodeEntry], begin: int, until: int) -> Epoch:
        return build_epoch(
            number=self._history.epoch.epoch + 1 if self._history.epoch else 1,
            not_before=begin,
            not_after=until,
            gateway=contents.gateway,
            issuers=contents.issuers,
            nodes=nodes,
            release=contents.release,
            profile=contents.profile,
            witnesses=[str(witness) for witness in self._trust.witnesses],
        )

    def _still_serves(self, waiting: _Waiting, contents: Contents, now: float) -> bool:
        is_newest = waiting.appended.checkpoint.size == self._history.size
        give_up_s = min(waiting.epoch.not_before + WAIT_S, waiting.epoch.not_after)
        return is_newest and waiting.contents == contents and now < give_up_s

    async def _gather_cosignatures(self, note: Note, now: float) -> Note:
        answers = await asyncio.gather(*(each.cosign(self._log, note) for each in self._cosigners), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, CloisterError):
                continue  # the threshold suffices; `open_checkpoint` counts them
            if isinstance(answer, BaseException):
                raise answer
            note = note.add(*answer)
        self._trust.open_checkpoint(str(note), now)
        return note


async def confirm(log: Log, cosigners: Sequence[Cosigner], threshold: int) -> None:
    """Has the witnesses cosign a log as it is, before anything is signed: an older copy of it must not go on, as that would be
    a second history, signed with its key.

    One witness that knows more is enough to stop it: others may have lagged, or were restored too, and would confirm it.

    Args:
        threshold: how many must confirm it.

    Raises:
        TransparencyError: a witness knows more of it or another tree, or too few confirm it.
    """
    checkpoint, note = log.checkpoint()
    answers = await asyncio.gather(*(each.cosign(log, note) for each in cosigners), return_exceptions=True)
    reasons, contrary = [], []
    for answer in answers:
        if isinstance(answer, (OlderLogError, SplitViewError)):
            contrary.append(answer.message)
        elif isinstance(answer, CloisterError):
            reasons.append(answer.message)
        elif isinstance(answer, BaseException):
            raise answer
    if contrary:
        raise TransparencyError(
            Reason.TOO_FEW_WITNESSES,
            f"nothing is added to the log with its {checkpoint.size} entries, since a witness knows more of it, or another "
            f"tree: {'; '.join(contrary)}. If this log is an older copy, restore the newest. A witness's answer is not "
            "signed: if it is wrong, and nobody who mirrors the log has other entries, leave out its --witness",
        )
    if len(answers) - len(reasons) < threshold:
        raise TransparencyError(
            Reason.TOO_FEW_WITNESSES,
            f"nothing is added to the log, since too few of its witnesses confirm its {checkpoint.size} entries: "
            f"{'; '.join(reasons)}",
        )


def select_nodes(
    contents: Contents, release: Release, membership: Membership | None, now: float
) -> tuple[list[tuple[NodeEntry, int]], dict[str, bytes], list[str]]:
    """Returns the nodes that match the epoch, with the expiry of their keys; their evidence; and why others are omitted.

    Clients verify the evidence; here it only needs to match the epoch, and be signed by a member.

    Raises:
        TransparencyError: no membership is valid, or no node is left.
    """
    if membership is None:
        raise TransparencyError(
            Reason.NO_MEMBERSHIP,
            "no membership holds, so clients would refuse every node; make one with cloister release members, and log it",
        )
    nodes: list[tuple[NodeEntry, int]] = []
    documents: dict[str, bytes] = {}
    left_out: list[str] = []
    for encoded in contents.evidence:
        digest = hashlib.sha256(encoded).hexdigest()
        try:
            evidence = read_evidence(encoded)
            statement = read_statement(evidence.statement)
        except CloisterError as error:
            left_out.append(f"evidence {digest[:16]} cannot be read: {error.message}")
            continue
        member = find_member(membership, evidence)
        wanted = (contents.release, release.model, contents.profile, release.profile_digest)
        if (statement.release, statement.model, statement.profile, statement.profile_digest) != wanted:
            left_out.append(f"node {statement.node_id[:16]} runs another release, model or profile than the epoch's")
        elif not statement.not_before <= now + 1 or statement.not_after < now + MIN_EPOCH_S:
            left_out.append(f"the keys of node {statement.node_id[:16]} do not hold now, or not long enough")
        elif member is None:
            left_out.append(
                f"no member of membership {membership.number} signed for node {statement.node_id[:16]}; start it with "
                "--member-key"
            )
        elif member.capacity != statement.capacity:
            left_out.append(f"{member.name} states the capacity {statement.capacity}; its membership says {member.capacity}")
        elif any(node.member == member.name for node, _ in nodes):
            left_out.append(f"node {statement.node_id[:16]} is not the only one of {member.name}; stop one of them")
        else:
            # All clients read all epochs, so the keys are only in the evidence to keep epochs small.
            entry = NodeEntry(statement.node_id, statement.capacity, b"", digest, member.name)
            nodes.append((entry, statement.not_after))
            documents[digest] = encoded
    if not nodes:
        message = "no node can stand in the epoch: " + ("; ".join(left_out) or "none sent evidence")
        raise TransparencyError(Reason.MALFORMED, message)
    return nodes, documents, left_out
