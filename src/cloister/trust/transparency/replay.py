"""Replays a whole log, reports its faults, and describes its entries.

No I/O, no clock. A client stops at the first rule that the newest epoch breaks; a replay continues, because earlier faults
matter too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from cloister.trust.transparency.dsse import Envelope
from cloister.trust.transparency.epoch import EPOCH_PREFIX, Epoch, parse_epoch
from cloister.trust.transparency.history import History, Pace
from cloister.trust.transparency.membership import (
    DAY_S,
    MEMBERSHIP_PREFIX,
    MOST_HELD,
    Membership,
    Past,
    Roll,
    add_held,
    check_members,
    held_within_a_day,
    least_kept,
    read_membership,
)
from cloister.trust.transparency.merkle import hash_leaf, make_root, nodes_of
from cloister.trust.transparency.note import PublicKey
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.release import (
    MINIMUM_PREFIX,
    RELEASE_PREFIX,
    MinimumRelease,
    ReleaseEntry,
    read_minimum,
    read_release,
)
from cloister.trust.transparency.tiles import LogReader

MOST_CHANGE: Final = 0.5
"""Fraction of the capacity that clients permit to change within a day (`client.limits`)."""
LEAST_PRESENT: Final = 0.66
"""Fraction of the capacity that an epoch must name for clients to draw (`client.limits`)."""
NODE_KEY_S: Final = 3600 + 600
"""Limit for a node's key, which lives an hour; an epoch with it may begin slightly later."""
GATEWAY_KEY_S: Final = 2 * DAY_S
"""Limit for a gateway's key, which lives a day and is published for some time longer."""
ISSUER_KEYS_S: Final = DAY_S
"""Minimum interval of new issuer keys. A key signs for a week; two new ones within a day would divide clients by time of
purchase."""


@dataclass(frozen=True)
class Remark:
    """A remark about the log.

    Attributes:
        kind: `order`, `membership`, `capacity`, `pace`, `cadence`, `keys`, `release` or `entry`.
        text: a sentence for users.
        is_fault: whether it is a fault that an honest operator never causes; otherwise it is news.
    """

    kind: str
    text: str
    is_fault: bool = True


class Course(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a replay between two entries.

    Attributes:
        epoch: number of the newest; 0 before the first.
        ends: latest end of any epoch, Unix seconds.
        roll: the valid membership.
        pace: rate of epochs.
        minimum: no release with a smaller number runs.
        releases: number of each release by digest.
        past: the memberships of the last day.
        nodes: time at which each node_id of the newest epoch was first named, Unix seconds.
        gateway, gateway_s: digest of the gateway's keys, and since when.
        issuers: when each issuer key was first named, by URL and digest.
    """

    epoch: int = 0
    ends: int = 0
    roll: Roll = Roll()
    pace: Pace = Pace()
    minimum: int = 0
    releases: dict[str, int] = {}
    past: Past = ()
    nodes: dict[str, int] = {}
    gateway: str = ""
    gateway_s: int = 0
    issuers: dict[str, dict[str, int]] = {}


@dataclass
class Replay:
    """Processes entries in order.

    Attributes:
        log: origin of the log.
        keys: release keys.
        course: its state.
    """

    log: str
    keys: tuple[PublicKey, ...]
    course: Course = field(default_factory=Course)

    def take(self, index: int, entry: bytes) -> Iterator[Remark]:
        """Yields remarks about the next entry."""
        try:
            if entry.startswith(EPOCH_PREFIX):
                yield from self._take_epoch(index, parse_epoch(entry.removeprefix(EPOCH_PREFIX)))
            elif entry.startswith(MEMBERSHIP_PREFIX):
                yield from self._take_membership(index, entry)
            elif entry.startswith(RELEASE_PREFIX):
                release = read_release(entry, self.keys)
                releases = {**self.course.releases, release.digest: release.number}
                self.course = replace(self.course, releases=releases)
                yield Remark("release", f"entry {index}: release {release.number} ({release.digest[:16]})", False)
            elif entry.startswith(MINIMUM_PREFIX):
                minimum = read_minimum(entry, self.keys)
                self.course = replace(self.course, minimum=max(minimum, self.course.minimum))
                yield Remark("release", f"entry {index}: releases below {minimum} are revoked", False)
            else:
                yield Remark("entry", f"entry {index} is of no kind that is known here; update the monitor, or ask what it is")
        except TransparencyError as error:
            yield Remark("entry", f"entry {index} says nothing to any client: {error.message}")

    def _take_epoch(self, index: int, epoch: Epoch) -> Iterator[Remark]:
        course, pace = self.course, self.course.pace.after(epoch)
        at = pace.begun  # a backdated epoch does not make anything older
        where = f"epoch {epoch.epoch} (entry {index})"
        if epoch.epoch != course.epoch + 1:
            yield Remark("order", f"{where} follows epoch {course.epoch}")
        if course.ends and epoch.not_before > course.ends:
            yield Remark("cadence", f"{where} begins {epoch.not_before - course.ends} s after the one before it ended", False)
        roll = course.roll.begin(at)
        if pace.excess:
            yield Remark("pace", f"{where}: {pace.excess}")
        yield from self._compare_members(where, epoch, roll, at)
        yield from self._check_release(where, epoch)
        yield from self._check_keys(where, epoch)
        yield from self._check_issuers(where, epoch, at)
        nodes = {node.node_id: course.nodes.get(node.node_id, at) for node in epoch.nodes}
        recent = {name: first for name, first in course.nodes.items() if at - first < DAY_S}
        gateway = hashlib.sha256(epoch.gateway.keys).hexdigest()
        past = course.past if roll.current is None else add_held(held_within_a_day(course.past, at), roll.current, at)
        self.course = replace(
            self.course, epoch=epoch.epoch, ends=max(course.ends, epoch.not_after), roll=roll, pace=pace,
            nodes={**recent, **nodes}, gateway=gateway, gateway_s=course.gateway_s if gateway == course.gateway else at,
            past=past,
        )  # fmt: skip

    def _compare_members(self, where: str, epoch: Epoch, roll: Roll, at: int) -> Iterator[Remark]:
        try:
            held = check_members(epoch, roll.current)
        except TransparencyError as error:
            kind = "capacity" if error.reason is Reason.WRONG_CAPACITY else "membership"
            yield Remark(kind, f"{where}: {error.message}")
            return
        before, past = self.course.roll.current, held_within_a_day(self.course.past, at)
        if before is not None and held.number != before.number:
            yield Remark("membership", f"{where}: membership {held.number} holds now", False)
            kept, earlier = least_kept(past, held)
            if kept < 1.0 - MOST_CHANGE:
                yield Remark("membership", f"{where}: membership {held.number} keeps {kept:.0%} of membership {earlier.number}")
            if len(past) == MOST_HELD:
                yield Remark("membership", f"{where}: more than {MOST_HELD} memberships held within a day")
        void = [one.membership.number for one in self.course.roll.coming if one not in roll.coming]
        for number in void:
            if number != held.number and all(one.membership.number != number for one in roll.coming):
                yield Remark(
                    "membership", f"{where}: membership {number} never holds: it came too late, or was replaced", False
                )
        absent = {member.name for member in held.members} - {node.member for node in epoch.nodes}
        if absent:
            share = epoch.capacity / held.capacity
            is_fault = share < LEAST_PRESENT
            yield Remark("membership", f"{where} leaves out {', '.join(sorted(absent))}; {share:.0%} is there", is_fault)

    def _check_release(self, where: str, epoch: Epoch) -> Iterator[Remark]:
        number = self.course.releases.get(epoch.release)
        if number is None:
            yield Remark("release", f"{where} names release {epoch.release[:16]}, which no release key signed in this log")
        elif number < self.course.minimum:
            yield Remark("release", f"{where} names release {number}, which was revoked")

    def _check_keys(self, where: str, epoch: Epoch) -> Iterator[Remark]:
        for node in epoch.nodes:
            age_s = epoch.not_after - self.course.nodes.get(node.node_id, epoch.not_before)
            if age_s > NODE_KEY_S:
                yield Remark(
                    "keys",
                    f"{where}: the key of {node.member or node.node_id[:16]} is named for {age_s} s; an hour is the most",
                )
        gateway = hashlib.sha256(epoch.gateway.keys).hexdigest()
        age_s = epoch.not_after - self.course.gateway_s
        if gateway == self.course.gateway and age_s > GATEWAY_KEY_S:
            yield Remark("keys", f"{where}: the gateway's keys are named for {age_s // 3600} h; two days are the most")

    def _check_issuers(self, where: str, epoch: Epoch, at: int) -> Iterator[Remark]:
        issuers = {url: dict(keys) for url, keys in self.course.issuers.items()}
        for issuer in epoch.issuers:
            before = self.course.issuers.get(issuer.url, {})
            digest = hashlib.sha256(issuer.token_key).hexdigest()
            if digest in before:
                continue
            if any(at - first < ISSUER_KEYS_S for first in before.values()):
                yield Remark("keys", f"{where}: the issuer {issuer.url} has another new key within a day")
            # the age of a log's first keys is unknown
            issuers.setdefault(issuer.url, {})[digest] = at if self.course.epoch else 0
        self.course = replace(self.course, issuers=issuers)

    def _take_membership(self, index: int, entry: bytes) -> Iterator[Remark]:
        membership = read_membership(entry, self.keys)
        roll = self.course.roll.add(entry, self.log, self.keys)
        if roll is self.course.roll:
            yield Remark(
                "membership", f"entry {index}: membership {membership.number} for {membership.log} says nothing in this log"
            )
            return
        self.course = replace(self.course, roll=roll)
        names = ", ".join(f"{member.name} {member.capacity / membership.capacity:.0%}" for member in membership.members)
        begins = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(membership.not_before))
        yield Remark("membership", f"entry {index}: membership {membership.number} from {begins} on: {names}", False)


# Describes a log's entries, and checks a copy of a whole log.


def describe_entry(entry: bytes) -> dict[str, str | int]:
    """Returns a description of an entry, without checking signatures."""
    try:
        if entry.startswith(EPOCH_PREFIX):
            epoch = parse_epoch(entry.removeprefix(EPOCH_PREFIX))
            return {"kind": "epoch", "number": epoch.epoch, "nodes": len(epoch.nodes), "release": epoch.release}
        if entry.startswith(RELEASE_PREFIX):
            release = msgspec.json.decode(entry.removeprefix(RELEASE_PREFIX), type=ReleaseEntry).release
            return {"kind": "release", "number": release.number, "version": release.version, "release": release.digest}
        if entry.startswith(MINIMUM_PREFIX):
            envelope = msgspec.json.decode(entry.removeprefix(MINIMUM_PREFIX), type=Envelope)
            return {"kind": "minimum", "number": msgspec.json.decode(envelope.payload, type=MinimumRelease).minimum}
        if entry.startswith(MEMBERSHIP_PREFIX):
            envelope = msgspec.json.decode(entry.removeprefix(MEMBERSHIP_PREFIX), type=Envelope)
            membership = msgspec.json.decode(envelope.payload, type=Membership)
            return {
                "kind": "membership",
                "number": membership.number,
                "members": len(membership.members),
                "capacity": membership.capacity,
                "not_before": membership.not_before,
            }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TransparencyError):
        return {"kind": "broken", "bytes": len(entry)}
    return {"kind": "unknown", "bytes": len(entry)}


def verify_log(reader: LogReader, release_keys: Sequence[PublicKey]) -> Iterator[str]:
    """Checks a whole log; returns one line for each verified property.

    Raises:
        TransparencyError: the first property that is violated.
        ConfigError: there is no log.
    """
    checkpoint, note = reader.checkpoint()
    yield f"checkpoint of {checkpoint.size} entries, signed by {checkpoint.origin}, with {len(note.signatures)} signatures"
    entries = reader.entries(0, checkpoint.size, checkpoint.size)
    if make_root(nodes_of([hash_leaf(entry) for entry in entries]), checkpoint.size) != checkpoint.root:
        raise TransparencyError(Reason.NOT_CONSISTENT, "the entries do not have the checkpoint's root")
    if reader.root(checkpoint.size) != checkpoint.root:
        raise TransparencyError(Reason.NOT_CONSISTENT, "the tiles do not have the checkpoint's root")
    yield "every entry and every tile leads to the checkpoint's root"
    history = History(reader, release_keys)
    history.advance(checkpoint.size)
    newest = history.epoch
    yield f"epochs are numbered one after the other, up to {newest.epoch if newest else 0}"
    held = history.roll.current
    yield (
        f"membership {held.number} holds: {_count(len(held.members), 'node')} with the capacity {held.capacity}"
        if held
        else "no membership holds yet"
    )
    least = f"{history.minimum} is the least that may run" if history.minimum else "none was revoked"
    yield f"{_count(len(history.releases), 'release')} with the signature of a trusted key; {least}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
