"""The contents of a log, read incrementally: the newest epoch, releases, revocations, and the pace of epochs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from cloister.trust.transparency.epoch import EPOCH_PREFIX, Count, Epoch, LoggedEntry, parse_epoch
from cloister.trust.transparency.membership import MEMBERSHIP_PREFIX, Roll
from cloister.trust.transparency.note import PublicKey
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.release import MINIMUM_PREFIX, RELEASE_PREFIX, Release, read_minimum, read_release
from cloister.trust.transparency.tiles import WIDTH, LogReader


class History:
    """The state defined by a log's entries up to `size`.

    Attributes:
        size: number of entries read.
        epoch: the newest epoch; None before the first.
        begun: latest start of any epoch, Unix seconds.
        pace: of the epochs.
        minimum: no release with a smaller number runs.
        releases: number, digest and index of each release that a trusted key signed, by digest.
        roll: the valid membership, and those that may follow.
    """

    def __init__(self, reader: LogReader, release_keys: Iterable[PublicKey]) -> None:
        self._reader = reader
        self._keys = tuple(release_keys)
        self.size = 0
        self.epoch: Epoch | None = None
        self.begun = 0
        self.pace = Pace()
        self.minimum = 0
        self.releases: dict[str, tuple[Release, int]] = {}
        self.roll = Roll()
        self._minimum_index: int | None = None

    def advance(self, size: int) -> None:
        """Reads the entries up to `size`.

        Raises:
            TransparencyError: an epoch does not follow the previous one, or the log on disk was changed.
        """
        while self.size < size:
            end = min(size, (self.size // WIDTH + 1) * WIDTH)
            for index, entry in enumerate(self._reader.entries(self.size, end, size), start=self.size):
                self._take(index, entry)
            self.size = end

    def roll_at(self, now: float) -> Roll:
        """The roll if an epoch began now, Unix seconds."""
        return self.roll.begin(max(self.begun, int(now)))

    def release(self, digest: str) -> Release:
        """A release that may run.

        Raises:
            TransparencyError: it is not logged under a trusted key, or it was revoked.
        """
        if digest not in self.releases:
            raise TransparencyError(Reason.WRONG_RELEASE, f"no release {digest[:16]} is logged; log it with: cloister release")
        release, _ = self.releases[digest]
        if release.number < self.minimum:
            raise TransparencyError(
                Reason.REVOKED, f"release {release.number} was revoked; {self.minimum} is the least that may run"
            )
        return release

    def logged_release(self, digest: str) -> LoggedEntry:
        """Returns a release's entry with its proof in the tree of `size` leaves."""
        return self._logged(self.releases[digest][1])

    def logged_minimum(self) -> LoggedEntry | None:
        """Returns the revocation entry with its proof."""
        return None if self._minimum_index is None else self._logged(self._minimum_index)

    def _take(self, index: int, entry: bytes) -> None:
        if entry.startswith(EPOCH_PREFIX):
            epoch = parse_epoch(entry.removeprefix(EPOCH_PREFIX))
            expected = self.epoch.epoch + 1 if self.epoch else 1
            if epoch.epoch != expected:
                message = f"entry {index} of the log is epoch {epoch.epoch} where {expected} had to follow"
                raise TransparencyError(Reason.OUT_OF_ORDER, message)
            self.pace = self.pace.after(epoch)
            self.epoch, self.begun = epoch, max(self.begun, epoch.not_before)
            self.roll = self.roll.begin(self.begun)
        elif entry.startswith(MEMBERSHIP_PREFIX):
            self.roll = self.roll.add(entry, self._reader.key.name, self._keys)
        elif entry.startswith(RELEASE_PREFIX):
            with contextlib.suppress(TransparencyError):  # not signed by a trusted key: ignored
                release = read_release(entry, self._keys)
                self.releases.setdefault(release.digest, (release, index))
        elif entry.startswith(MINIMUM_PREFIX):
            with contextlib.suppress(TransparencyError):
                minimum = read_minimum(entry, self._keys)
                if minimum > self.minimum:
                    self.minimum, self._minimum_index = minimum, index

    def _logged(self, index: int) -> LoggedEntry:
        (entry,) = self._reader.entries(index, index + 1, self.size)
        return LoggedEntry(entry, index, self._reader.prove_inclusion(index, self.size))


# The pace of epochs, counted from the log alone. No I/O, no clock.
#
# Epochs in short succession can distinguish clients: a gateway could give each client a different public epoch, and recognise
# its requests by the gateway key in it. So clients enforce a rate with the generic cell rate algorithm (ITU-T I.371): a short
# burst, because a restarted gateway needs two, and then one per `EPOCH_EVERY_S`.


EPOCH_EVERY_S = 60
"""Our gateway waits as long between two (`private.epochs`)."""
GATEWAY_KEYS_EVERY_S = 3600
"""A gateway's key lives for a day, but in memory only: a restarted gateway has a new one."""
BURST = 5
"""Burst size of both."""


class Pace(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of both rate limits after the epochs that were read.

    Attributes:
        begun: latest start of any epoch, Unix seconds.
        epochs_due, keys_due: when both limits are fully available again, Unix seconds.
        gateway: SHA-256 of the gateway's keys in it, in hex.
        keys_from: when these keys would have been within the limit, Unix seconds.
        excess: why the newest epoch exceeds a limit; empty if it does not.
    """

    begun: Count = 0
    epochs_due: Count = 0
    keys_due: Count = 0
    gateway: Annotated[str, Meta(max_length=64)] = ""
    keys_from: Count = 0
    excess: Annotated[str, Meta(max_length=200)] = ""

    def after(self, epoch: Epoch) -> Pace:
        """Returns the pace after another epoch of the log.

        An epoch counts as no older than earlier ones: otherwise a backdated epoch would reset both limits for the next real
        one.
        """
        at, gateway = max(epoch.not_before, self.begun), hashlib.sha256(epoch.gateway.keys).hexdigest()
        epochs_due, epochs_from = _count(self.epochs_due, at, EPOCH_EVERY_S)
        keys_due, keys_from = self.keys_due, self.keys_from
        if gateway != self.gateway:
            keys_due, keys_from = _count(self.keys_due, at, GATEWAY_KEYS_EVERY_S)
        excess = ""
        if epoch.not_before < self.begun:
            excess = "it begins before the one that it follows"
        elif at < epochs_from:
            excess = f"more than {BURST} epochs came faster than one in {EPOCH_EVERY_S} s"
        elif at < keys_from:
            excess = f"the gateway changed its keys more than {BURST} times, faster than once in {GATEWAY_KEYS_EVERY_S} s"
        return Pace(at, epochs_due, keys_due, gateway, keys_from, excess)


def _count(due: int, at: int, every_s: int) -> tuple[int, int]:
    """Returns when the limit is fully available again, and when this event is within it: now, or up to `every_s` later."""
    due = max(due, at) + every_s
    most = at + BURST * every_s
    return min(due, most), at + max(due - most, 0)
