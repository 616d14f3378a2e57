"""Checkpoints (C2SP tlog-checkpoint): a log's name, size and root, as the text of a signed note. No I/O, no clock."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from cloister.privacy.transparency.merkle import HASH_BYTES
from cloister.privacy.transparency.note import Note, PublicKey, parse_note
from cloister.privacy.transparency.refusal import Reason, TransparencyError

_SIZE = re.compile(r"(0|[1-9][0-9]{0,15})\Z")


@dataclass(frozen=True)
class Checkpoint:
    """What a log says about itself.

    Attributes:
        origin: the log's name.
        size: its number of leaves.
        root: RFC 6962 root over them, 32 bytes.
    """

    origin: str
    size: int
    root: bytes

    def __str__(self) -> str:
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


def parse_checkpoint(text: str) -> Checkpoint:
    """Reads the text of a checkpoint.

    Extension lines are refused: nothing in a tree vouches for them, so a log could mark each client's copy with them.

    Raises:
        TransparencyError: it is not three lines of this form.
    """
    lines = text.split("\n")
    if len(lines) != 4 or lines[3] or not lines[0] or not _SIZE.match(lines[1]):
        raise TransparencyError(Reason.MALFORMED, "a checkpoint is three lines: origin, size, root")
    try:
        root = base64.b64decode(lines[2], validate=True)
    except binascii.Error:
        root = b""
    checkpoint = Checkpoint(lines[0], int(lines[1]), root)
    if len(root) != HASH_BYTES or str(checkpoint) != text:
        raise TransparencyError(Reason.MALFORMED, "the checkpoint's root is not the base64 of 32 bytes")
    return checkpoint


def open_checkpoint(text: str, log: PublicKey) -> tuple[Checkpoint, Note]:
    """Reads a signed checkpoint of one log.

    Raises:
        TransparencyError: it is malformed, of another log, or not signed by this one.
    """
    note = parse_note(text)
    checkpoint = parse_checkpoint(note.text)
    if checkpoint.origin != log.name:
        raise TransparencyError(Reason.OTHER_LOG, f"the checkpoint is not of the log {log.name}")
    try:
        signed = note.is_signed_by(log)
    except TransparencyError:
        signed = False
    if not signed:
        raise TransparencyError(Reason.BAD_LOG_SIGNATURE, f"the checkpoint is not signed by the log {log.name}")
    return checkpoint, note
