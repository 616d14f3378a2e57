"""A persistent record of the keys that an issuer published, in the log and directly. It must use one at a time.

The log is shared by all clients: a client reads every epoch of the last month from it, so a new client knows what others were
shown. The file next to the client's view stores keys that were seen elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from cloister.client.errors import IssuerContradictionError, NoTokensError
from cloister.trust.transparency.checks import VerifiedEpoch, View, unpack_fetched
from cloister.trust.transparency.epoch import EPOCH_PREFIX, Count, IssuerEntry, parse_epoch
from cloister.trust.transparency.files import SECRET, locked, remove_unfinished_of, write_whole
from cloister.trust.transparency.issuer_keys import (
    MAX_KEY_LIFE_S,
    OVERLAP_S,
    IssuerIdentity,
    content_of,
    encode_proof,
    find_contradiction,
)
from cloister.types.errors import ConfigError

REACH_S = MAX_KEY_LIFE_S + OVERLAP_S
"""Keys of older epochs have expired, with all of their tokens."""

MOST_KEYS = 64
"""Most keys of one issuer within that time; an honest one publishes six."""


class SeenKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A key that the issuer published.

    Attributes:
        entry: the statement.
        first_epoch, last_epoch: range of the epochs that named it; 0 if only the issuer itself did.
    """

    entry: IssuerEntry
    first_epoch: Count
    last_epoch: Count


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    issuer: str = ""
    size: Count = 0
    seen: Annotated[tuple[SeenKey, ...], Meta(max_length=MOST_KEYS)] = ()


class IssuerRecord:
    """The record of one issuer.

    Args:
        issuer: None records nothing.
        path: file that persists the record; None keeps it in memory only.

    Attributes:
        size: number of log entries that were read.

    Raises:
        ConfigError: the file is damaged. It is not ignored: an attacker who damaged it could hide a second key.
    """

    def __init__(self, issuer: IssuerIdentity | None, path: Path | None) -> None:
        self._issuer = issuer
        self._path = path
        self._name = "" if issuer is None else f"{issuer.url} {issuer.key}"
        kept = self._load()
        self.size = kept.size
        self._seen = {content_of(seen.entry): seen for seen in kept.seen}

    @property
    def seen(self) -> tuple[SeenKey, ...]:
        """The keys whose tokens can still be spent, oldest first."""
        return tuple(sorted(self._seen.values(), key=lambda seen: seen.entry.not_before))

    def begin(self, view: View) -> View:
        """Returns the view from which to read the log: the client's own, or an empty one if this record is behind it."""
        return view if self.size == view.size else View()

    def read_log(self, begin: View, believed: VerifiedEpoch, fetched: Mapping[str, bytes], now: float) -> None:
        """Adds the verified entries of the log from `begin` on.

        Raises:
            TransparencyError: an entry is malformed.
        """
        size = believed.checkpoint.size
        for entry in reversed(list(unpack_fetched(begin.size, size, fetched))):
            if entry.startswith(EPOCH_PREFIX):
                epoch = parse_epoch(entry.removeprefix(EPOCH_PREFIX))
                if epoch.not_before >= now - REACH_S:  # an older one may be among newer ones, so continue reading
                    self._take(epoch.issuers, epoch.epoch)
        self.size = size
        self._save(now)

    def see(self, entries: Iterable[IssuerEntry], now: float) -> None:
        """Adds the issuer's own statement of its keys.

        Raises:
            IssuerContradictionError: it contradicts earlier statements.
        """
        self._take(entries, 0)
        self._save(now)
        self.check()

    def check(self) -> None:
        """Checks that the issuer published one key at a time.

        Raises:
            IssuerContradictionError: it published two; the proof was written next to the record.
            NoTokensError: it published more keys than a client stores.
        """
        if len(self._seen) >= MOST_KEYS:
            raise NoTokensError(
                f"The issuer states {MOST_KEYS} keys or more for one month, so none is used; ask who runs it why."
            )
        found = find_contradiction(seen.entry for seen in self._seen.values())
        if found is None or self._issuer is None:
            return
        proof = encode_proof(self._issuer, found)
        first, second = (_name_epochs(self._seen[content_of(entry)]) for entry in found)
        raise IssuerContradictionError(
            f"The issuer at {self._issuer.url} signed two statements that contradict each other, one {first}, one {second}: it "
            "could tell whose token it is, so none is bought or spent until one of them has ended. "
            f"{self._keep_proof(proof)}",
            proof,
        )

    def _take(self, entries: Iterable[IssuerEntry], epoch: int) -> None:
        """Adds statements; those that the issuer did not sign are ignored."""
        for entry in entries:
            content = content_of(entry)
            before = self._seen.get(content)
            if before is not None and entry.url == before.entry.url:
                first = min(before.first_epoch or epoch, epoch or before.first_epoch)
                self._seen[content] = SeenKey(before.entry, first, max(before.last_epoch, epoch))
            elif self._issuer is not None and len(self._seen) < MOST_KEYS and self._issuer.has_signed(entry):
                self._seen[content] = SeenKey(entry, epoch, epoch)

    def _load(self) -> _File:
        empty = _File(self._name)
        if self._path is None:
            return empty
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_File)
            return kept if kept.issuer == self._name else empty
        except FileNotFoundError:
            return empty
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path} is broken ({error}); remove it to read the log from its beginning again") from None

    def _save(self, now: float) -> None:
        """Drops keys whose tokens have expired, and writes the others, merged with those that other clients of the file added
        meanwhile."""
        self._forget(now)
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self._path.parent}: {error.strerror}") from None
        with locked(self._path.parent):
            remove_unfinished_of(self._path)
            kept = self._load()
            for seen in kept.seen[: MOST_KEYS - len(self._seen)]:
                self._seen.setdefault(content_of(seen.entry), seen)
            self._forget(now)
            file = _File(self._name, max(self.size, kept.size), self.seen)
            if file != kept:
                write_whole(self._path, msgspec.json.encode(file, order="sorted"), SECRET)

    def _forget(self, now: float) -> None:
        self._seen = {what: seen for what, seen in self._seen.items() if now < seen.entry.not_after + OVERLAP_S}

    def _keep_proof(self, proof: bytes) -> str:
        if self._path is None:
            return "Keep the proof in a file: give the client one for its state."
        path = self._path.with_name(f"issuer-proof-{hashlib.sha256(proof).hexdigest()[:16]}.json")
        if not path.exists():
            write_whole(path, proof)
        return f"Show others the proof: {path} (cloister verify issuer)."


def beside(view: Path) -> Path:
    """Returns the path of the record of a client whose view of the log is in this file."""
    return view.with_name(f"{view.stem}.issuer.json")


def _name_epochs(seen: SeenKey) -> str:
    if not seen.first_epoch:
        return "by itself"
    return (
        f"in epoch {seen.first_epoch}"
        if seen.first_epoch == seen.last_epoch
        else f"in epochs {seen.first_epoch} to {seen.last_epoch}"
    )
