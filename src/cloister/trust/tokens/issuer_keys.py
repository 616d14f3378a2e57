"""The issuer's keys on disk: rotated every seven days, announced a day ahead, old private keys destroyed.

Epochs count seven days each from 1970 on, the same on every machine, so a key's number determines its validity. Tokens of a key
are accepted for one more day after it stops signing, so that tokens held at the rotation can still be spent.
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

    def check_current(self, now: float) -> None:
        """Refuses a directory that may be an older copy: `turn` would make a second key for a week that has one.

        A key is made a day before it signs, so an issuer that ran then has it. To call when an issuer starts.

        Raises:
            ConfigError: there are keys of earlier weeks only.
        """
        current = int(now) // EPOCH_S
        epochs = [int(path.stem) for path in self._directory.glob("*.json") if path.stem.isdecimal()]
        if epochs and max(epochs) < current:
            due = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(current * EPOCH_S - AHEAD_S))
            raise ConfigError(
                f"the issuer's directory {self._directory} has keys of earlier weeks only. If it is an older copy, restore the "
                "newest: a second key for this week would stop every client for eight days. If this issuer has not run since "
                f"{due}, it has shown no key of this week: remove the files in that directory, and start it again"
            )

    def turn(self, now: float) -> list[IssuerKey]:
        """Creates the keys due at a time, destroys expired private keys, and returns the current keys, oldest first.

        Raises:
            ConfigError: the directory or a file in it cannot be used.
        """
        current = int(now) // EPOCH_S
        wanted = [current] if (current + 1) * EPOCH_S - now > AHEAD_S else [current, current + 1]
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
        return [keys[epoch] for epoch in sorted(keys)]

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
            raise ConfigError(f"the issuer's key file {path} is broken; restore it, or remove it: its tokens are lost then")
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


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
