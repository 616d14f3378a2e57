"""What a client remembers of the log, in a file that other programs of the same user read on too.

Each program holds the log to what it saw itself and to what the file has. So programs that are shown two logs, by two relays
or at two times, find it at the next epoch, whichever of them wrote last.
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
    """Returns a file's name for a log: by its key, since two logs may call themselves alike."""
    return f"{log.key_id.hex()}{log.key.hex()[:24]}.json"


MOST_TRIES: Final = 5
"""How often the log is read again because another program wrote the file meanwhile."""
MOST_PROOFS: Final = 16
"""Pairs of checkpoints that are kept: a relay that hands out old copies could else fill the disk."""


@dataclass(frozen=True)
class Beginning:
    """From where the log is read on.

    Attributes:
        own: what this program saw.
        filed: what the file has; `own` where there is none.
    """

    own: View
    filed: View

    @property
    def newest(self) -> View:
        """The one that saw more of the log."""
        return max(self.filed, self.own, key=lambda view: view.size)


class SharedView:
    """The view of one program, and the file; without a file only the first.

    Raises:
        ConfigError: the file is broken.
    """

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self._own = View() if memory is None else memory.load()

    def begin(self) -> Beginning:
        """Returns what the next checkpoint has to lead on from.

        Raises:
            ConfigError: the file is broken.
        """
        return Beginning(self._own, self._own if self._memory is None else self._memory.load())

    def save(self, view: View, begun: Beginning) -> bool:
        """Remembers a view that leads on from both that it was begun from.

        Returns:
            False: another program changed the file meanwhile, and nobody knows whether both saw one log. Begin again.
        """
        if view.size >= self._own.size:
            self._own = view
        return self._memory is None or self._memory.save(view, begun.filed)

    def keep_proof(self, error: TransparencyError) -> str:
        """Writes the checkpoints that contradict each other beside the file; returns a sentence that says where, or nothing."""
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
