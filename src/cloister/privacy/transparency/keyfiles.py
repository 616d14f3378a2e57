"""Signer keys of logs, witnesses and releases as files that only their owner can open."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cloister.privacy.transparency.files import SECRET, write_whole
from cloister.privacy.transparency.note import PrivateKey
from cloister.privacy.transparency.refusal import TransparencyError
from cloister.types.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_key(path: Path) -> PrivateKey:
    """Reads a signer key; no error has anything of it in its text.

    Raises:
        ConfigError: it is missing, damaged, or open to other users of the machine.
    """
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096).decode()
    except OSError as error:
        raise ConfigError(f"no signer key can be read at {path}: {error.strerror}; make one with: cloister log key") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not valid UTF-8, so it is no signer key; make one with: cloister log key") from None
    if mode & _OTHERS:
        raise ConfigError(f"other users can open the signer key {path}; close it with: chmod 600 {path}")
    try:
        return PrivateKey.parse(text)
    except TransparencyError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def write_key(path: Path, key: PrivateKey) -> None:
    """Writes a signer key that was not there before.

    Raises:
        ConfigError: there is a file already, or none can be written.
    """
    path = path.expanduser()
    if path.exists():
        raise ConfigError(f"{path} is there already; a key is never written over, for what it signed could not be checked")
    write_whole(path, key.encode().encode() + b"\n", SECRET)
