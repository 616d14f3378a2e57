"""What the entries of a log say, read once and kept up to date: the newest epoch, the releases, and what is revoked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from cloister.privacy.transparency.bundle import LoggedEntry
from cloister.privacy.transparency.epoch import EPOCH_PREFIX, Epoch, parse_epoch
from cloister.privacy.transparency.membership import MEMBERSHIP_PREFIX, Roll
from cloister.privacy.transparency.note import PublicKey
from cloister.privacy.transparency.reader import LogReader
from cloister.privacy.transparency.refusal import Reason, TransparencyError
from cloister.privacy.transparency.release import MINIMUM_PREFIX, RELEASE_PREFIX, Release, read_minimum, read_release
from cloister.privacy.transparency.tiles import WIDTH


class History:
    """The meaning of a log's entries up to `size`.

    Attributes:
        size: entries read.
        epoch: the newest epoch; None before the first.
        begun: the latest time at which one of the epochs begins, Unix seconds.
        minimum: no release with a smaller number runs.
        releases: number, digest and index of each release that a trusted key signed, by digest.
        roll: which membership holds, and which may follow.
    """

    def __init__(self, reader: LogReader, release_keys: Iterable[PublicKey]) -> None:
        self._reader = reader
        self._keys = tuple(release_keys)
        self.size = 0
        self.epoch: Epoch | None = None
        self.begun = 0
        self.minimum = 0
        self.releases: dict[str, tuple[Release, int]] = {}
        self.roll = Roll()
        self._minimum_index: int | None = None

    def advance(self, size: int) -> None:
        """Reads the entries up to `size`.

        Raises:
            TransparencyError: an epoch does not follow the one before, or the log on disk was changed.
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
        """A release's entry with its proof in the tree of `size` leaves."""
        return self._logged(self.releases[digest][1])

    def logged_minimum(self) -> LoggedEntry | None:
        """The entry that says what is revoked, with its proof."""
        return None if self._minimum_index is None else self._logged(self._minimum_index)

    def _take(self, index: int, entry: bytes) -> None:
        if entry.startswith(EPOCH_PREFIX):
            epoch = parse_epoch(entry.removeprefix(EPOCH_PREFIX))
            expected = self.epoch.epoch + 1 if self.epoch else 1
            if epoch.epoch != expected:
                message = f"entry {index} of the log is epoch {epoch.epoch} where {expected} had to follow"
                raise TransparencyError(Reason.OUT_OF_ORDER, message)
            self.epoch, self.begun = epoch, max(self.begun, epoch.not_before)
            self.roll = self.roll.begin(self.begun)
        elif entry.startswith(MEMBERSHIP_PREFIX):
            self.roll = self.roll.add(entry, self._reader.key.name, self._keys)
        elif entry.startswith(RELEASE_PREFIX):
            with contextlib.suppress(TransparencyError):  # signed by nobody who is trusted: it says nothing
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
