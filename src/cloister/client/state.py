"""Where a client remembers what it saw of a log, unless it is told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cloister.privacy.transparency.note import PublicKey

STATE_FOLDER: Final = Path("~/.local/state/cloister/logs")
"""In the user's home (XDG Base Directory Specification, `$HOME/.local/state`)."""


def state_file(log: PublicKey) -> Path:
    """Returns the file for a log."""
    return STATE_FOLDER / state_name(log)


def state_name(log: PublicKey) -> str:
    """Returns a file's name for a log: by its key, since two logs may call themselves alike."""
    return f"{log.key_id.hex()}{log.key.hex()[:24]}.json"
