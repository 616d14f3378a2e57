"""The cloud's nodes and their capacities, signed by a release key rather than the gateway; and limits on changes per day.

A membership is an entry of the log. The first one is valid from its start time; a later one only if it was in the log under an
epoch that began `NOTICE_S` before its start, so that it is announced. The log alone determines which one is valid: all readers
of the same entries get the same result. A node proves its member identity by a signature over its statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from cloister.trust.attestation.evidence import Evidence
from cloister.trust.transparency.dsse import Envelope, open_envelope, seal_envelope
from cloister.trust.transparency.epoch import MAX_CAPACITY, Count, Epoch, VerifierKey
from cloister.trust.transparency.note import Kind, PrivateKey, PublicKey
from cloister.trust.transparency.refusal import Reason, TransparencyError

MEMBERSHIP_PREFIX = b"cloister membership v1\n"
MEMBERSHIP_TYPE = "application/vnd.cloister.membership+json"
NOTICE_S = 600
"""Notice period: how long before its start a membership must be in the log, under a public epoch."""
MAX_MEMBERS = 240
MAX_COMING = 16
MEMBER_EXTRA = "member"
"""Name of the evidence extra with the member's name and signature."""
_CONTEXT = b"cloister member v1\n"


class Member(Struct, frozen=True, forbid_unknown_fields=True):
    """A node that belongs to the cloud, independent of its current keys.

    Attributes:
        key: verifier key of the node's member key; its name is the member's name.
        capacity: its weight in the draw, above 0.
    """

    key: VerifierKey
    capacity: Annotated[int, Meta(gt=0, le=MAX_CAPACITY)]

    @property
    def public(self) -> PublicKey:
        """The key, read."""
        return PublicKey.parse(self.key)

    @property
    def name(self) -> str:
        """The member's name in epochs."""
        return self.key.partition("+")[0]


class Membership(Struct, frozen=True, forbid_unknown_fields=True):
    """All members, with the start of validity.

    Attributes:
        number: increasing; a membership whose number is not above all earlier ones is ignored.
        log: origin of its log, so that it cannot be used in another log.
        not_before: start of validity, Unix seconds.
        members: sorted by key; names and keys are unique.
    """

    number: Annotated[int, Meta(ge=1, lt=2**53)]
    log: Annotated[str, Meta(min_length=1, max_length=128)]
    not_before: Count
    members: Annotated[tuple[Member, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]

    @property
    def capacity(self) -> int:
        """Total capacity of all members."""
        return sum(member.capacity for member in self.members)

    def find(self, name: str) -> Member | None:
        """Returns the member of this name."""
        return next((member for member in self.members if member.name == name), None)

    def kept_of(self, earlier: Membership) -> int:
        """Returns the fraction of an earlier membership's capacity that the same members still have."""
        now = {member.key: member.capacity for member in self.members}
        return sum(min(member.capacity, now.get(member.key, 0)) for member in earlier.members)


def build_membership(number: int, log: str, not_before: int, capacities: Mapping[PublicKey, int]) -> Membership:
    """Creates a membership in canonical order.

    Raises:
        TransparencyError: a field is out of range, or a name occurs twice.
    """
    members = sorted((Member(str(key), capacity) for key, capacity in capacities.items()), key=lambda member: member.key)
    membership = Membership(number, log, not_before, tuple(members))
    return _parse(msgspec.json.encode(membership, order="sorted"))


def membership_entry(membership: Membership, keys: Iterable[PrivateKey]) -> bytes:
    """The log's entry for a membership, signed by release keys."""
    payload = msgspec.json.encode(membership, order="sorted")
    return MEMBERSHIP_PREFIX + msgspec.json.encode(seal_envelope(MEMBERSHIP_TYPE, payload, keys), order="sorted")


def read_membership(entry: bytes, keys: Iterable[PublicKey]) -> Membership:
    """Reads a membership's entry.

    Raises:
        TransparencyError: it is malformed, not signed by one of the keys, or inconsistent.
    """
    try:
        envelope = msgspec.json.decode(entry.removeprefix(MEMBERSHIP_PREFIX), type=Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransparencyError(Reason.MALFORMED, f"a membership of the log cannot be read: {error}") from None
    return _parse(open_envelope(envelope, MEMBERSHIP_TYPE, keys))


def sign_member(key: PrivateKey, evidence: Evidence) -> Evidence:
    """Returns the evidence with a member's name and its signature over the statement added."""
    signature = key.name.encode() + b"\n" + key.sign(_CONTEXT + evidence.report_data)
    return msgspec.structs.replace(evidence, extra={**evidence.extra, MEMBER_EXTRA: signature})


def find_member(membership: Membership, evidence: Evidence) -> Member | None:
    """Returns the member that signed the evidence's statement; None if none of this membership did."""
    name, _, _ = evidence.extra.get(MEMBER_EXTRA, b"").partition(b"\n")
    member = membership.find(name.decode(errors="replace"))
    return member if member is not None and is_signed_by(member.public, evidence) else None


def is_signed_by(key: PublicKey, evidence: Evidence) -> bool:
    """Returns whether the evidence's statement is signed with this member key."""
    _, _, signature = evidence.extra.get(MEMBER_EXTRA, b"").partition(b"\n")
    return key.verify(signature, _CONTEXT + evidence.report_data)


class Coming(Struct, frozen=True, forbid_unknown_fields=True):
    """A membership that is logged but not valid yet.

    Attributes:
        membership: its content.
        announced: start of the first epoch logged after it (see `Roll.begin`), Unix seconds; None if there is none yet.
    """

    membership: Membership
    announced: Count | None = None


class Roll(Struct, frozen=True, forbid_unknown_fields=True):
    """The valid membership after the entries that were read, and those that may follow.

    Attributes:
        number: number of the newest logged one; 0 before the first.
        current: the valid one; None before the first.
        coming: logged ones, oldest first.
    """

    number: Count = 0
    current: Membership | None = None
    coming: Annotated[tuple[Coming, ...], Meta(max_length=MAX_COMING)] = ()

    def add(self, entry: bytes, log: str, keys: Iterable[PublicKey]) -> Roll:
        """Returns the roll after another entry of the log; ignored entries leave it unchanged.

        Entries signed by another key, for another log or out of order are ignored, not errors: otherwise the log's operator
        could make the log unreadable by adding one.
        """
        try:
            membership = read_membership(entry, keys)
        except TransparencyError:
            return self
        if membership.log != log or membership.number <= self.number or len(self.coming) == MAX_COMING:
            return self
        return Roll(membership.number, self.current, (*self.coming, Coming(membership)))

    def begin(self, at: int) -> Roll:
        """Returns the roll after another epoch of the log.

        Args:
            at: latest start of this or any earlier epoch, Unix seconds (`Pace.begun`). The epoch's own start could be
                backdated, and would announce a membership in the past.
        """
        current, coming = self.current, list[Coming]()
        for one in self.coming:
            wanted = one.membership.not_before
            is_late = current is not None and (at if one.announced is None else one.announced) > wanted - NOTICE_S
            if is_late:
                continue  # announced too late, so it never becomes valid
            if wanted <= at:
                current = one.membership
            else:
                coming.append(Coming(one.membership, at if one.announced is None else one.announced))
        newer = tuple(one for one in coming if current is None or one.membership.number > current.number)
        return Roll(self.number, current, newer)


def check_members(epoch: Epoch, membership: Membership | None) -> Membership:
    """Checks an epoch against the valid membership: its nodes are unique members with the right capacities.

    Raises:
        TransparencyError: there is no membership, or the epoch contradicts it.
    """
    if membership is None:
        raise TransparencyError(
            Reason.NO_MEMBERSHIP,
            "the log has no membership that holds, so the gateway alone would say which nodes there are; its operator has to "
            "log one: cloister release members",
        )
    seen = set[str]()
    for node in epoch.nodes:
        member = membership.find(node.member)
        if member is None or node.member in seen:
            why = "stands twice in the epoch" if member else f"is not in membership {membership.number}"
            raise TransparencyError(
                Reason.NOT_A_MEMBER,
                f"the node {node.node_id[:8]} is called {node.member or 'by no name'}, which {why}; tell the signer of "
                "memberships, and wait for the next epoch",
            )
        if node.capacity != member.capacity:
            raise TransparencyError(
                Reason.WRONG_CAPACITY,
                f"the epoch gives {node.member} the capacity {node.capacity}, and membership {membership.number} "
                f"{member.capacity}; tell the signer of memberships, and wait for the next epoch",
            )
        seen.add(node.member)
    return membership


def _parse(payload: bytes) -> Membership:
    try:
        membership = msgspec.json.decode(payload, type=Membership)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransparencyError(Reason.MALFORMED, f"a membership cannot be read: {error}") from None
    if msgspec.json.encode(membership, order="sorted") != payload:
        raise TransparencyError(Reason.NOT_CANONICAL, "a membership is not in its canonical form")
    keys = [member.public for member in membership.members]
    texts = [member.key for member in membership.members]
    is_single = len({key.name for key in keys}) == len({key.key for key in keys}) == len(keys)
    if not is_single or texts != sorted(texts):
        raise TransparencyError(Reason.NOT_CANONICAL, "a membership's members are not in order, or one stands twice")
    if any(key.kind is not Kind.NOTE for key in keys):
        raise TransparencyError(Reason.MALFORMED, "a member's key is of kind 1: make it with cloister log key --role node")
    return membership


# The memberships of the last day, and the fraction of them that a new one retains. No I/O, no clock.
#
# A day's change is limited relative to every membership that was valid within that day, including its start: relative to a
# single one, two steps around its replacement would be counted separately.


DAY_S: Final = 86400
MOST_HELD: Final = 16
"""Maximum number of memberships stored for one day; with more, the day's change cannot be determined."""


class Held(Struct, frozen=True, forbid_unknown_fields=True):
    """A membership that was valid.

    Attributes:
        membership: its content.
        since_s: when it was first seen as valid, Unix seconds.
    """

    membership: Membership
    since_s: Count


Past = Annotated[tuple[Held, ...], Meta(max_length=MOST_HELD)]
"""Oldest first: the one that was valid a day ago (or the first one seen), and all later ones."""


def held_within_a_day(past: Past, at: int) -> Past:
    """Returns the past memberships with which one at a time, Unix seconds, is compared."""
    older = [index for index, held in enumerate(past) if held.since_s <= at - DAY_S]
    return past[older[-1] :] if older else past


def least_kept(past: Past, membership: Membership) -> tuple[float, Membership]:
    """Returns the smallest fraction that a membership retains of any past one, and that one.

    Args:
        past: at least one.
    """
    shares = [
        (membership.kept_of(held.membership) / max(held.membership.capacity, membership.capacity), held.membership)
        for held in past
    ]
    return min(shares, key=lambda share: share[0])


def add_held(past: Past, membership: Membership, at: int) -> Past:
    """Returns the past after a membership that is valid at a time, Unix seconds; the oldest is kept if there are too many."""
    if past and past[-1].membership == membership:
        return past
    return (*past[:1], *past[1:][-(MOST_HELD - 2) :], Held(membership, at))


def adopt_baseline(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a state file, converting the earlier version, which stored one membership."""
    if "baseline" not in fields:
        return fields
    rest = {name: value for name, value in fields.items() if name not in ("baseline", "baseline_s")}
    baseline, since_s = fields["baseline"], fields.get("baseline_s", 0)
    return {**rest, "past": [] if baseline is None else [{"membership": baseline, "since_s": since_s}]}
