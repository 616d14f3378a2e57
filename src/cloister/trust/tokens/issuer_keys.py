"""The issuer's keys on disk: rotated every seven days, made two days ahead, shown a day ahead, old private keys destroyed.

Epochs count seven days each from 1970 on, the same on every machine, so a key's number determines its validity. Tokens of a key
are accepted for one more day after it stops signing, so that tokens held at the rotation can still be spent.

A key is on disk for a day before anybody sees it. So a directory without a key that is due to be shown is an older copy, or its
issuer stood still for all of that day; an issuer that is restarted at that moment is neither.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cloister.trust.tokens.blind_rsa import KEY_BITS, RsaPrivateKey, encode_public, generate, key_id
from cloister.types.errors import ConfigError

EPOCH_S = 7 * 86400
GRACE_S = 86400
AHEAD_S = 86400
"""How long before its week a key is shown."""
_MAKE_S = 2 * AHEAD_S
"""How long before its week a key is made."""
_LOCK_S = 10.0
"""Timeout for the lock: far longer than another issuer needs to draw two keys."""


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """One key of the issuer.

    Attributes:
        epoch: its number; it signs from `issues_from` to `issues_until`, and its tokens are accepted until `taken_until`.
        encoded: the published encoding of the public key.
        budget: output tokens that one blind token pays for.
        private: None once its epoch is over.
    """

    epoch: int
    encoded: bytes
    budget: int
    private: RsaPrivateKey | None = field(default=None, repr=False)

    @property
    def issues_from(self) -> int:
        return self.epoch * EPOCH_S

    @property
    def issues_until(self) -> int:
        return self.issues_from + EPOCH_S

    @property
    def taken_until(self) -> int:
        return self.issues_until + GRACE_S

    @property
    def key_id(self) -> bytes:
        return key_id(self.encoded)


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: int
    budget: int
    public: str
    primes: tuple[str, str] | None = None
    version: int = 1


class KeyShelf:
    """Keys in a directory of mode 0700, one file per epoch.

    Args:
        budget: budget of new keys. Existing keys keep theirs, because their tokens were issued with it.
        make_key: generates a key with a number of bits.

    Raises:
        ConfigError: the directory cannot be used, or the budget is not positive.
    """

    def __init__(self, directory: Path, *, budget: int, make_key: Callable[[int], RsaPrivateKey] = generate) -> None:
        if budget < 1:
            raise ConfigError("a token pays for at least one token of output", param="token_budget")
        self._directory = directory
        self._budget = budget
        self._make_key = make_key
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot use the issuer's directory {directory}: {error.strerror}") from None

    def check_current(self, now: float, accepted: int | None = None) -> bool:
        """Refuses a directory that may be an older copy: `turn` would make a second key for a week that has one.

        To call when an issuer starts, or shows its keys.

        Args:
            now: Unix time in seconds.
            accepted: the newest week of which a key is shown by now, to go on without it.

        Returns:
            Whether a key is missing, which is accepted.

        Raises:
            ConfigError: the directory has keys, but not all that are shown by now.
        """
        due = _weeks(now, AHEAD_S)
        found = {int(path.stem) for path in self._directory.glob("*.json") if path.stem.isdecimal()}
        missing = [week for week in due if week not in found]
        if not found or not missing:
            return False
        if accepted == due[-1]:
            return True
        since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(missing[0] * EPOCH_S - AHEAD_S))
        weeks = " and ".join(map(str, missing))
        raise ConfigError(
            f"the issuer's directory {self._directory} has keys, but no key of week {weeks}, shown from {since} on. If it is "
            "an older copy, restore the newest: a second key for a week would stop every client for eight days. If this issuer "
            f"has not run since {since}, it has shown no such key: --accept-keys {due[-1]} makes one",
            param="accept_keys",
        )

    def turn(self, now: float) -> list[IssuerKey]:
        """Makes the keys due at a time, destroys expired private keys, and returns the keys that are shown then, oldest first.

        Raises:
            ConfigError: the directory or a file in it cannot be used.
        """
        wanted = _weeks(now, _MAKE_S)
        try:
            with self._locked():
                keys = {key.epoch: key for key in map(self._read, sorted(self._directory.glob("*.json")))}
                for epoch in wanted:
                    if epoch not in keys:
                        keys[epoch] = self._make(epoch, list(keys.values()))
                for key in list(keys.values()):
                    if key.taken_until <= now:
                        self._path(key.epoch).unlink()
                        del keys[key.epoch]
                    elif key.issues_until <= now and key.private is not None:
                        keys[key.epoch] = self._write(IssuerKey(key.epoch, key.encoded, key.budget))
        except OSError as error:
            raise ConfigError(f"cannot use the issuer's directory {self._directory}: {error.strerror}") from None
        return [keys[epoch] for epoch in sorted(keys) if keys[epoch].issues_from - AHEAD_S <= now]

    def _make(self, epoch: int, others: list[IssuerKey]) -> IssuerKey:
        taken = {key.key_id[-1] for key in others}
        while True:
            private = self._make_key(KEY_BITS)
            key = IssuerKey(epoch, encode_public(private.public), self._budget, private)
            if key.key_id[-1] not in taken:  # requests identify their key by this byte (RFC 9578, section 6.1)
                return self._write(key)

    def _write(self, key: IssuerKey) -> IssuerKey:
        primes = None if key.private is None else (hex(key.private.p), hex(key.private.q))
        record = _Record(key.epoch, key.budget, base64.b64encode(key.encoded).decode(), primes)
        temporary = self._directory / f".{key.epoch}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path(key.epoch))
        return key

    def _read(self, path: Path) -> IssuerKey:
        try:
            record = msgspec.json.decode(path.read_bytes(), type=_Record)
            encoded = base64.b64decode(record.public, validate=True)
            private = None if record.primes is None else RsaPrivateKey(*(int(prime, 16) for prime in record.primes))
            is_whole = private is None or encode_public(private.public) == encoded
        except (msgspec.DecodeError, ValueError):
            is_whole = False
        if not is_whole or record.version != 1 or path != self._path(record.epoch):
            raise ConfigError(
                f"the issuer's key file {path} is broken; restore it. Remove it only if its week has ended (its tokens are "
                "lost then): another key for a week would stop every client for eight days"
            )
        return IssuerKey(record.epoch, encoded, record.budget, private)

    def _path(self, epoch: int) -> Path:
        return self._directory / f"{epoch}.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Prevents two issuers of one directory from creating two keys for one epoch."""
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            give_up_s = time.monotonic() + _LOCK_S
            while not _try_lock(descriptor):
                if time.monotonic() >= give_up_s:
                    raise ConfigError(f"another issuer holds the directory {self._directory}; run one, or end the other one")
                time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)


def _weeks(now: float, ahead_s: int) -> list[int]:
    """The running week, and the next one if it begins within `ahead_s`."""
    return list(range(int(now) // EPOCH_S, (int(now) + ahead_s) // EPOCH_S + 1))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
