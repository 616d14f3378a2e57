"""The file of API keys: JSON, mode 0600, replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from cloister.policy.credentials import Credentials
from cloister.types.errors import ConfigError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_credentials(path: Path) -> Credentials:
    """Reads a key file.

    Raises:
        ConfigError: the file is missing, malformed, or accessible to other users; the message never has its content.
    """
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read()
    except FileNotFoundError:
        raise ConfigError(f"no API key file at {path}; make one with: cloister keys add NAME --file {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the API key file {path}: {error.strerror}") from None
    if mode & _OTHERS:
        raise ConfigError(f"other users can open the API key file {path}; close it with: chmod 600 {path}")
    return _parse(path, data)


def write_credentials(path: Path, credentials: Credentials) -> None:
    """Replaces a key file atomically; it is never accessible to other users.

    Raises:
        ConfigError: the directory cannot be written.
    """
    try:
        # mkstemp creates with mode 0600, in the same directory so that the replace is one rename.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(credentials), indent=2) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        remedy = "free some space, or name another file" if error.errno in _FULL else "check the folder and who may write to it"
        raise ConfigError(f"cannot write the API key file {path}: {error.strerror}; {remedy}; nothing was changed") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Path]:
    """Locks a key file against other writers while it is read, changed and written; creates its directory (0700) if needed.

    Yields:
        The path with links resolved, so that a replace keeps the link.

    Raises:
        ConfigError: another process is changing it.
    """
    path = path.expanduser().resolve()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot use the directory of the API key file {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is changing the API key file {path}; try again when it is done") from None
        yield path
    finally:
        os.close(directory)


def _parse(path: Path, data: bytes) -> Credentials:
    try:
        return msgspec.json.decode(data, type=Credentials)
    except msgspec.DecodeError as error:
        # The error's text has positions and types only. The exception chain is still cut: a traceback could show `data`.
        why = str(error)
    raise ConfigError(
        f"the API key file {path} is broken ({why}); restore it, or remove it and make new keys with: "
        f"cloister keys add NAME --file {path}"
    )
