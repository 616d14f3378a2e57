"""Where a client remembers what it saw of a log, unless it is told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cloister.privacy.transparency.note import PublicKey

STATE_FOLDER: Final = Path("~/.local/state/cloister/logs")
"""In the user's home (XDG Base Directory Specification, `$HOME/.local/state`)."""


def state_file(log: PublicKey) -> Path:
    """Returns the file for a log: one for each, named by its key, since two logs may call themselves alike."""
    return STATE_FOLDER / f"{log.key_id.hex()}{log.key.hex()[:24]}.json"
