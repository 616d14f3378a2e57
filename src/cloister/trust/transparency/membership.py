"""The cloud's nodes and their capacities, signed by a release key rather than the gateway; and how far a day may change them.

A membership is an entry of the log. The first one holds from its time on; a later one holds only if an epoch that began
`NOTICE_S` before it had it in the log, so that nobody is surprised by it. Which one holds follows from the log alone: every
reader of the same entries comes to the same answer. A node shows which member it is by a signature over its statement.
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
"""How long before it holds a membership has to be in the log, under an epoch that everybody was given."""
MAX_MEMBERS = 240
MAX_COMING = 16
MEMBER_EXTRA = "member"
"""Under this name evidence carries the member's name and signature."""
_CONTEXT = b"cloister member v1\n"


class Member(Struct, frozen=True, forbid_unknown_fields=True):
    """A node that belongs to the cloud, whatever keys it has this hour.

    Attributes:
        key: verifier key of the node's member key; its name is the member's name.
        capacity: its share of the draw, above 0.
    """

    key: VerifierKey
    capacity: Annotated[int, Meta(gt=0, le=MAX_CAPACITY)]

    @property
    def public(self) -> PublicKey:
        """The key, read."""
        return PublicKey.parse(self.key)

    @property
    def name(self) -> str:
        """What epochs call this member."""
        return self.key.partition("+")[0]


class Membership(Struct, frozen=True, forbid_unknown_fields=True):
    """All members, and from when on.

    Attributes:
        number: counts up; a number that is not above every earlier one says nothing.
        log: origin of the log that it is for, so that it cannot be logged elsewhere.
        not_before: Unix seconds from which it holds.
        members: sorted by key; no name and no key stands twice.
    """

    number: Annotated[int, Meta(ge=1, lt=2**53)]
    log: Annotated[str, Meta(min_length=1, max_length=128)]
    not_before: Count
    members: Annotated[tuple[Member, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]

    @property
    def capacity(self) -> int:
        """The sum over all members."""
        return sum(member.capacity for member in self.members)

    def find(self, name: str) -> Member | None:
        """Returns the member of this name."""
        return next((member for member in self.members if member.name == name), None)

    def kept_of(self, earlier: Membership) -> int:
        """Returns how much of an earlier membership's capacity the same members still have."""
        now = {member.key: member.capacity for member in self.members}
        return sum(min(member.capacity, now.get(member.key, 0)) for member in earlier.members)


def build_membership(number: int, log: str, not_before: int, capacities: Mapping[PublicKey, int]) -> Membership:
    """Makes a membership in its one order.

    Raises:
        TransparencyError: something is out of range, or a name stands twice.
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
        TransparencyError: it is none, not signed by one of the keys, or breaks its own rules.
    """
    try:
        envelope = msgspec.json.decode(entry.removeprefix(MEMBERSHIP_PREFIX), type=Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransparencyError(Reason.MALFORMED, f"a membership of the log cannot be read: {error}") from None
    return _parse(open_envelope(envelope, MEMBERSHIP_TYPE, keys))


def sign_member(key: PrivateKey, evidence: Evidence) -> Evidence:
    """Returns the evidence with the name of a member and its signature over the statement."""
    signature = key.name.encode() + b"\n" + key.sign(_CONTEXT + evidence.report_data)
    return msgspec.structs.replace(evidence, extra={**evidence.extra, MEMBER_EXTRA: signature})


def find_member(membership: Membership, evidence: Evidence) -> Member | None:
    """Returns the member that signed the evidence's statement; None if none of this membership did."""
    name, _, signature = evidence.extra.get(MEMBER_EXTRA, b"").partition(b"\n")
    member = membership.find(name.decode(errors="replace"))
    if member is None or not member.public.verify(signature, _CONTEXT + evidence.report_data):
        return None
    return member


class Coming(Struct, frozen=True, forbid_unknown_fields=True):
    """A membership that is logged and does not hold yet.

    Attributes:
        membership: what it says.
        announced: when the first epoch that was logged after it began (see `Roll.begin`), Unix seconds; None before there is
            one.
    """

    membership: Membership
    announced: Count | None = None


class Roll(Struct, frozen=True, forbid_unknown_fields=True):
    """Which membership holds after the entries that were read, and which may follow.

    Attributes:
        number: of the newest that was logged; 0 before the first.
        current: the one that holds; None before the first.
        coming: logged ones, oldest first.
    """

    number: Count = 0
    current: Membership | None = None
    coming: Annotated[tuple[Coming, ...], Meta(max_length=MAX_COMING)] = ()

    def add(self, entry: bytes, log: str, keys: Iterable[PublicKey]) -> Roll:
        """Returns the roll after one more entry of the log; one that says nothing leaves it as it is.

        An entry that another key signed, for another log or out of its order cannot stop anybody either: the log's operator
        could otherwise make its own log unreadable by adding one.
        """
        try:
            membership = read_membership(entry, keys)
        except TransparencyError:
            return self
        if membership.log != log or membership.number <= self.number or len(self.coming) == MAX_COMING:
            return self
        return Roll(membership.number, self.current, (*self.coming, Coming(membership)))

    def begin(self, at: int) -> Roll:
        """Returns the roll after one more epoch of the log.

        Args:
            at: the latest time at which it or one of the epochs before it begins, Unix seconds (`Pace.begun`). Its own alone
                could be dated back, and would announce a membership in the past.
        """
        current, coming = self.current, list[Coming]()
        for one in self.coming:
            wanted = one.membership.not_before
            is_late = current is not None and (at if one.announced is None else one.announced) > wanted - NOTICE_S
            if is_late:
                continue  # it surprises, so it never holds
            if wanted <= at:
                current = one.membership
            else:
                coming.append(Coming(one.membership, at if one.announced is None else one.announced))
        newer = tuple(one for one in coming if current is None or one.membership.number > current.number)
        return Roll(self.number, current, newer)


def check_members(epoch: Epoch, membership: Membership | None) -> Membership:
    """Checks an epoch against the membership that holds: who is in it, once each, and with what capacity.

    Raises:
        TransparencyError: there is no membership, or the epoch says something else.
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
                f"the node {node.node_id[:8]} is called {node.member or 'by no name'}, which {why}; tell whoever signs "
                "memberships, and wait for the next epoch",
            )
        if node.capacity != member.capacity:
            raise TransparencyError(
                Reason.WRONG_CAPACITY,
                f"the epoch gives {node.member} the capacity {node.capacity}, and membership {membership.number} "
                f"{member.capacity}; tell whoever signs memberships, and wait for the next epoch",
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


# The memberships of the last day, and how much of them a new one retains. No I/O, no clock.
#
# A day's change is bounded against every membership that held within that day, its beginning included: against a single one,
# two steps around the moment at which that one is replaced would be taken for one each.


DAY_S: Final = 86400
MOST_HELD: Final = 16
"""Memberships of one day that are remembered; with more of them the day's change is not known any more."""


class Held(Struct, frozen=True, forbid_unknown_fields=True):
    """A membership that held.

    Attributes:
        membership: what it says.
        since_s: when it was first seen to hold, Unix seconds.
    """

    membership: Membership
    since_s: Count


Past = Annotated[tuple[Held, ...], Meta(max_length=MOST_HELD)]
"""Oldest first: the one that held a day ago (or the first that was seen), and all that held since."""


def held_within_a_day(past: Past, at: int) -> Past:
    """Returns the part of the past that a membership at a time, Unix seconds, is held against."""
    older = [index for index, held in enumerate(past) if held.since_s <= at - DAY_S]
    return past[older[-1] :] if older else past


def least_kept(past: Past, membership: Membership) -> tuple[float, Membership]:
    """Returns what part of its capacity a membership keeps of the one of which it keeps least, and that one.

    Args:
        past: one at least.
    """
    shares = [
        (membership.kept_of(held.membership) / max(held.membership.capacity, membership.capacity), held.membership)
        for held in past
    ]
    return min(shares, key=lambda share: share[0])


def add_held(past: Past, membership: Membership, at: int) -> Past:
    """Returns the past with a membership that holds at a time, Unix seconds; the oldest stays where there are too many."""
    if past and past[-1].membership == membership:
        return past
    return (*past[:1], *past[1:][-(MOST_HELD - 2) :], Held(membership, at))


def adopt_baseline(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a state file; those of an earlier version, which remembered one membership, as they are now."""
    if "baseline" not in fields:
        return fields
    rest = {name: value for name, value in fields.items() if name not in ("baseline", "baseline_s")}
    baseline, since_s = fields["baseline"], fields.get("baseline_s", 0)
    return {**rest, "past": [] if baseline is None else [{"membership": baseline, "since_s": since_s}]}
