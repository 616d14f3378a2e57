"""A client's view of the log, in a file shared by programs of the same user.

Each program checks the log against its own view and the file's. So if programs are shown two logs, by two relays or at two
times, they detect it at the next epoch, whichever wrote last.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloister.trust.transparency.checks import Memory, View
from cloister.trust.transparency.files import SECRET, write_whole
from cloister.trust.transparency.note import PublicKey
from cloister.trust.transparency.refusal import TransparencyError
from cloister.types.errors import ConfigError

STATE_FOLDER: Final = Path("~/.local/state/cloister/logs")
"""In the user's home (XDG Base Directory Specification, `$HOME/.local/state`)."""


def state_file(log: PublicKey) -> Path:
    """Returns the file for a log."""
    return STATE_FOLDER / state_name(log)


def state_name(log: PublicKey) -> str:
    """Returns a file name for a log, derived from its key, because two logs may have the same name."""
    return f"{log.key_id.hex()}{log.key.hex()[:24]}.json"


MOST_TRIES: Final = 5
"""How often the log is read again because another program wrote the file meanwhile."""
MOST_PROOFS: Final = 16
"""Maximum number of stored pairs of checkpoints: otherwise a relay that serves old copies could fill the disk."""


@dataclass(frozen=True)
class Beginning:
    """The views from which reading continues.

    Attributes:
        own: this program's view.
        filed: the file's view; `own` if there is no file.
    """

    own: View
    filed: View

    @property
    def newest(self) -> View:
        """The view with more entries."""
        return max(self.filed, self.own, key=lambda view: view.size)


class SharedView:
    """The view of one program, and the file if there is one.

    Raises:
        ConfigError: the file is damaged.
    """

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self._own = View() if memory is None else memory.load()

    def begin(self) -> Beginning:
        """Returns the views that the next checkpoint must extend.

        Raises:
            ConfigError: the file is damaged.
        """
        return Beginning(self._own, self._own if self._memory is None else self._memory.load())

    def save(self, view: View, begun: Beginning) -> bool:
        """Stores a view that extends both starting views.

        Returns:
            False: another program changed the file meanwhile, and it is unknown whether both saw the same log. Start again.
        """
        if view.size >= self._own.size:
            self._own = view
        return self._memory is None or self._memory.save(view, begun.filed)

    def keep_proof(self, error: TransparencyError) -> str:
        """Writes contradictory checkpoints next to the file; returns a sentence with their location, or ""."""
        if self._memory is None or len(error.evidence) != 2 or not all(error.evidence):
            return ""
        path = self._memory.path
        name = hashlib.sha256("".join(error.evidence).encode()).hexdigest()[:16]
        notes = [path.with_name(f"{path.stem}.{what}-{name}.note") for what in ("seen", "shown")]
        if len(list(path.parent.glob(f"{path.stem}.seen-*.note"))) >= MOST_PROOFS and not notes[0].exists():
            return f" {MOST_PROOFS} pairs of checkpoints are kept beside {path}, so this one is not; move them away."
        try:
            for note, checkpoint in zip(notes, error.evidence, strict=True):
                write_whole(note, checkpoint.encode(), SECRET)
        except ConfigError as failed:
            return f" Both signed checkpoints could not be kept: {failed.message}."
        return (
            f" Both signed checkpoints are kept, show them to others: {notes[0]} and {notes[1]} (cloister monitor --peer FILE)."
        )
