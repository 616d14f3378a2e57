"""Atomic file replacement, locked directories, and signing-key files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from cloister.trust.transparency.note import PrivateKey
from cloister.trust.transparency.refusal import TransparencyError
from cloister.types.errors import ConfigError

LOCK_DEADLINE_S = 30.0
PUBLIC = 0o644
SECRET = 0o600
_UNFINISHED = ".unfinished-"


def write_whole(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Writes a file atomically and durably: a reader, a crash or a full disk leaves the old content or the new, never a part.

    Raises:
        ConfigError: the directory cannot be written, or the disk is full; the old file is unchanged.
    """
    temporary = path.with_name(f"{_UNFINISHED}{path.name}-{secrets.token_hex(8)}")
    try:
        _make_directory(path.parent)
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        sync_directory(path.parent)
    except OSError as error:
        remedy = (
            "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the path and who may write there"
        )
        raise ConfigError(f"cannot write {path}: {error.strerror}; {remedy}") from None


def _make_directory(directory: Path) -> None:
    """Creates a directory and its parents durably, each before its content."""
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable (fsync)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(directory: Path) -> None:
    """Removes temporary files of killed writers below a directory; the caller must hold the directory's lock."""
    for left in directory.rglob(f"{_UNFINISHED}*"):
        left.unlink(missing_ok=True)


def remove_unfinished_of(path: Path) -> None:
    """Removes temporary files of killed writers of one file; the caller must hold the lock of its directory."""
    for left in path.parent.glob(f"{_UNFINISHED}{glob.escape(path.name)}-*"):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks a directory against other processes that use this lock; the lock is released when the process ends.

    Raises:
        ConfigError: the directory does not exist, or another process holds the lock longer than `LOCK_DEADLINE_S`.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot use the directory {directory}: {error.strerror}") from None
    try:
        give_up = time.monotonic() + LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise ConfigError(f"another process holds {directory}; try again when it is done") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


# Signing-key files of logs, witnesses and releases, readable by their owner only.


_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_key(path: Path) -> PrivateKey:
    """Reads a signer key; errors never contain any part of it.

    Raises:
        ConfigError: it is missing, damaged, or accessible to other users of the machine.
    """
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096).decode()
    except OSError as error:
        raise ConfigError(f"no signer key can be read at {path}: {error.strerror}; {_make_key(path)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not valid UTF-8, so it is no signer key; {_make_key(path)}") from None
    if mode & _OTHERS:
        raise ConfigError(f"other users can open the signer key {path}; close it with: chmod 600 {path}")
    try:
        return PrivateKey.parse(text)
    except TransparencyError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def _make_key(path: Path) -> str:
    return f"make one with: cloister log key NAME --out {path}, and for all but a log's own --role ROLE (its --help has them)"


def write_key(path: Path, key: PrivateKey) -> None:
    """Writes a new signer key.

    Raises:
        ConfigError: the file already exists, or cannot be written.
    """
    path = path.expanduser()
    if path.exists():
        raise ConfigError(f"{path} is there already; a key is never written over, for what it signed could not be checked")
    write_whole(path, key.encode().encode() + b"\n", SECRET)
