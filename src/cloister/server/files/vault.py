"""A directory of encrypted, authenticated records: unreadable without the key, and tampering is detected.

A file is a sequence of records, each AES-256-GCM (NIST SP 800-38D) under a random nonce: 4 bytes of length (big-endian), 12 of
nonce, the ciphertext. The file's name and the record's number are authenticated with it, so that no record can be moved,
omitted before another, or put into another file. A truncated last record, after a crash or a full disk, counts as never
written.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.types.errors import CloisterError, ConfigError

KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_HEAD_BYTES: Final = 4 + _NONCE_BYTES
_TAG_BYTES: Final = 16
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StorageFullError(CloisterError):
    """There is no space to store the data (RFC 4918, 11.5)."""

    code = "storage_full"
    status = 507


class DamagedError(CloisterError):
    """Stored data was tampered with, or is encrypted under another key."""

    code = "damaged_file"
    status = 500

    def __init__(self) -> None:
        super().__init__("What was kept cannot be read: it was changed, or its key was. Delete it and send it again.")


class Vault:
    """One directory, in use by one server at a time. Its methods may be called from any thread.

    Args:
        path: the directory; created (0700) if it does not exist.
        key: 32 bytes.
        most_bytes: size limit of all files together.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, path: Path, key: bytes, most_bytes: int) -> None:
        self._path = path
        self._key = key
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._directory = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path) if entry.is_file()}
        except BlockingIOError:
            self.close()
            raise ConfigError(f"another server keeps its files in {path}; give each its own", param="files") from None
        except OSError as error:
            self.close()
            raise ConfigError(f"the directory {path} cannot be used for files: {error.strerror}", param="files") from None

    def close(self) -> None:
        """Releases the directory to another server."""
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def names(self) -> list[str]:
        """Returns the names of all files."""
        with self._lock:
            return list(self._sizes)

    def derive(self, purpose: bytes) -> bytes:
        """Derives a key of 32 bytes for one purpose from the vault's key."""
        return hmac.digest(self._key, b"cloister/files/1\0" + purpose, "sha256")

    def read(self, name: str, key: bytes) -> Iterator[bytes]:
        """Yields the records of a file, each read when it is asked for; none if it does not exist.

        Raises:
            DamagedError: a record was changed, or encrypted under another key.
        """
        cipher = AESGCM(key)
        for number, (file, nonce, sealed_bytes) in enumerate(self._heads(name)):
            try:
                yield cipher.decrypt(nonce, file.read(sealed_bytes), _place(name, number))
            except InvalidTag:
                raise DamagedError from None

    def count_bytes(self, name: str) -> int:
        """Returns the length of all records of a file together, as their heads state it; 0 if it does not exist."""
        return sum(sealed_bytes - _TAG_BYTES for _, _, sealed_bytes in self._heads(name))

    def _heads(self, name: str) -> Iterator[tuple[BinaryIO, bytes, int]]:
        """Yields the file, which stands behind the head, and nonce and length of each record that is there as a whole."""
        try:
            file = (self._path / name).open("rb")
        except FileNotFoundError:
            return
        with file:
            place, most_bytes = 0, os.fstat(file.fileno()).st_size
            while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
                sealed_bytes = int.from_bytes(head[:4])
                place += _HEAD_BYTES + sealed_bytes
                if place > most_bytes:
                    return
                yield file, head[4:], sealed_bytes
                file.seek(place)

    def replace(self, name: str, key: bytes, record: bytes, *, is_small: bool = False) -> None:
        """Writes a file of one record atomically and durably.

        Args:
            is_small: exempt from the limit while the disk has space: a batch's status must not be lost.

        Raises:
            StorageFullError: there is no space.
        """
        sealed = _seal(key, name, 0, record)
        draft = self._path / f".{name}"
        if not is_small:
            self._make_room(len(sealed) - self._sizes.get(name, 0))
        with _in_words():
            try:
                with _opened(draft, os.O_TRUNC) as descriptor:
                    _write(descriptor, sealed)
                draft.replace(self._path / name)
                os.fsync(self._directory)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
        with self._lock:
            self._sizes[name] = len(sealed)

    def append(self, name: str, key: bytes, number: int, record: bytes) -> None:
        """Appends record `number` durably to a file with that many records. One caller per file.

        Raises:
            StorageFullError: there is no space; the file is unchanged.
        """
        sealed = _seal(key, name, number, record)
        self._make_room(len(sealed))
        with self._lock:
            size = self._sizes.get(name, 0)
        with _in_words(), _opened(self._path / name) as descriptor:
            try:
                os.ftruncate(descriptor, size)
                os.lseek(descriptor, size, os.SEEK_SET)
                _write(descriptor, sealed)
            except BaseException:
                os.ftruncate(descriptor, size)
                raise
        with self._lock:
            self._sizes[name] = size + len(sealed)

    def mend(self, name: str, key: bytes) -> Iterator[bytes]:
        """Yields the records of a file. At their end it removes a truncated last one, so that others can follow."""
        size = 0
        for record in self.read(name, key):
            size += _HEAD_BYTES + len(record) + _TAG_BYTES
            yield record
        with self._lock:
            if name in self._sizes:
                self._sizes[name] = size

    def remove(self, name: str) -> None:
        """Removes a file, if it exists."""
        with self._lock:
            self._sizes.pop(name, None)
        (self._path / name).unlink(missing_ok=True)

    def _make_room(self, more: int) -> None:
        with self._lock:
            if sum(self._sizes.values()) + more > self._most_bytes:
                raise StorageFullError("This server has no room left for files; delete some, or wait until they expire.")


@contextmanager
def _in_words() -> Iterator[None]:
    """Describes a disk error."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError("The server's disk is full; try again later, or tell its operator.") from None
        raise CloisterError(
            f"The server cannot write to its disk ({error.strerror}); tell its operator.", code="storage_failed"
        ) from None


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_key(path: Path) -> bytes:
    """Returns the key in a file, which is created (0600) if it does not exist.

    Raises:
        ConfigError: it cannot be read or created, is accessible to other users, or has other content.
    """
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(
                    f"the key file {path} is open to other users; close it with: chmod 600 {path}", param="files_key"
                )
            key = file.read(KEY_BYTES + 1)
    except FileNotFoundError:
        return _make_key(path)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}", param="files_key") from None
    if len(key) < KEY_BYTES:
        raise ConfigError(
            f"the key file {path} holds {len(key)} of {KEY_BYTES} bytes: it was cut short, for example by a full disk; restore "
            "it from a copy, or delete it if nothing was stored with it, and a new one is made",
            param="files_key",
        )
    if len(key) > KEY_BYTES:
        raise ConfigError(f"the key file {path} must hold {KEY_BYTES} random bytes; a missing one is made", param="files_key")
    return key


def _make_key(path: Path) -> bytes:
    from cloister.trust.transparency.files import SECRET, locked, write_whole  # 10 ms, at the first start only

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be made: {error.strerror}", param="files_key") from None
    with locked(path.parent):
        if not path.exists():  # else another server was faster
            write_whole(path, os.urandom(KEY_BYTES), SECRET)
    return read_key(path)


def _seal(key: bytes, name: str, number: int, record: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    sealed = AESGCM(key).encrypt(nonce, record, _place(name, number))
    return len(sealed).to_bytes(4) + nonce + sealed


def _place(name: str, number: int) -> bytes:
    return name.encode() + b"\0" + number.to_bytes(8)


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
