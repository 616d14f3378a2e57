"""Signed notes (C2SP signed-note), checkpoints (tlog-checkpoint) and cosignatures (tlog-cosignature v1), on Ed25519."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cloister.trust.transparency.merkle import HASH_BYTES
from cloister.trust.transparency.refusal import Reason, TransparencyError

MAX_NOTE_BYTES = 16_384
MAX_SIGNATURES = 32
MAX_NAME_CHARACTERS = 128
_DASH = "— "
_PRIVATE = "PRIVATE+KEY+"


class Kind(IntEnum):
    """What a key signs: the byte that C2SP signed-note assigns."""

    NOTE = 1
    """The note's text (and, here, DSSE envelopes)."""

    COSIGNATURE = 4
    """`cosignature/v1`, a time and the text: a witness's statement about a checkpoint."""


@dataclass(frozen=True)
class PublicKey:
    """A verifier key, written `name+key id+base64(kind || key)`."""

    name: str
    kind: Kind
    key: bytes

    @property
    def key_id(self) -> bytes:
        """The first four bytes of SHA-256(name || newline || kind || key)."""
        return hashlib.sha256(self.name.encode() + b"\n" + bytes([self.kind]) + self.key).digest()[:4]

    def __str__(self) -> str:
        return f"{self.name}+{self.key_id.hex()}+{_encode64(bytes([self.kind]) + self.key)}"

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Reads a verifier key.

        Raises:
            TransparencyError: it is not one, or its key id is not its own.
        """
        name, kind, key, key_id = _split_key(text.strip(), "verifier key")
        public = cls(name, kind, key)
        if public.key_id.hex() != key_id:
            raise TransparencyError(Reason.MALFORMED, "the verifier key's id does not belong to it; copy the key whole")
        return public

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether this key made this Ed25519 signature (RFC 8032) over the message."""
        try:
            Ed25519PublicKey.from_public_bytes(self.key).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, repr=False)
class PrivateKey:
    """A signer key, without a repr, so that no traceback shows the seed."""

    name: str
    kind: Kind
    seed: bytes

    @classmethod
    def generate(cls, name: str, kind: Kind) -> PrivateKey:
        """Creates a new key.

        Raises:
            TransparencyError: the name has white space, a plus sign or a control character, or is too long.
        """
        _check_name(name)
        return cls(name, kind, Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def parse(cls, text: str) -> PrivateKey:
        """Reads the output of `encode`; errors never contain the key.

        Raises:
            TransparencyError: it is not a signer key.
        """
        text = text.strip()
        if not text.startswith(_PRIVATE):
            raise TransparencyError(Reason.MALFORMED, f"a signer key begins with {_PRIVATE}")
        name, kind, seed, key_id = _split_key(text.removeprefix(_PRIVATE), "signer key")
        private = cls(name, kind, seed)
        if private.public.key_id.hex() != key_id:
            raise TransparencyError(Reason.MALFORMED, "the signer key's id does not belong to it; the file is damaged")
        return private

    def encode(self) -> str:
        """`PRIVATE+KEY+name+key id+base64(kind || seed)`, as Go's sumdb/note writes it."""
        return f"{_PRIVATE}{self.name}+{self.public.key_id.hex()}+{_encode64(bytes([self.kind]) + self.seed)}"

    @property
    def public(self) -> PublicKey:
        """The key that verifies."""
        return PublicKey(self.name, self.kind, self._key().public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """An Ed25519 signature, 64 bytes."""
        return self._key().sign(message)

    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)


@dataclass(frozen=True)
class Signature:
    """A line under a note.

    Attributes:
        name: the key's name.
        key_id: its four bytes.
        signature: format by the key's kind; for a cosignature 8 bytes of time, then 64.
    """

    name: str
    key_id: bytes
    signature: bytes

    def __str__(self) -> str:
        return f"{_DASH}{self.name} {_encode64(self.key_id + self.signature)}\n"

    def is_by(self, key: PublicKey) -> bool:
        """Whether it claims to be by this key."""
        return self.name == key.name and self.key_id == key.key_id


@dataclass(frozen=True)
class Note:
    """Text that ends with a newline, and the signatures under it."""

    text: str
    signatures: tuple[Signature, ...] = ()

    def __str__(self) -> str:
        return self.text + "\n" + "".join(map(str, self.signatures))

    def add(self, *signatures: Signature) -> Note:
        """The note with more signatures; one by the same key replaces the old one."""
        new = {(signature.name, signature.key_id) for signature in signatures}
        kept = tuple(old for old in self.signatures if (old.name, old.key_id) not in new)
        return replace(self, signatures=kept + signatures)

    def sign(self, key: PrivateKey) -> Note:
        """The note with a signature by this key over its text."""
        return self.add(Signature(key.name, key.public.key_id, key.sign(self.text.encode())))

    def is_signed_by(self, key: PublicKey) -> bool:
        """Whether `key` signed the text.

        Raises:
            TransparencyError: a signature claims to be by the key but is not; then the whole note is untrustworthy.
        """
        mine = [signature for signature in self.signatures if signature.is_by(key)]
        if not all(key.verify(signature.signature, self.text.encode()) for signature in mine):
            raise TransparencyError(Reason.BAD_SIGNATURE, f"a signature in the name of {key.name} is false")
        return bool(mine)


def parse_note(text: str) -> Note:
    """Reads a signed note.

    Raises:
        TransparencyError: it is too long, or not a signed note.
    """
    if len(text.encode()) > MAX_NOTE_BYTES:
        raise TransparencyError(Reason.TOO_LARGE, f"a signed note has {MAX_NOTE_BYTES:,} bytes at most")
    body, blank, lines = text.rpartition("\n\n")
    if not blank or not lines.endswith("\n") or any(character < " " and character != "\n" for character in text):
        raise TransparencyError(Reason.MALFORMED, "this is not a signed note: text, an empty line, signature lines")
    return Note(body + "\n", parse_signatures(lines))


def parse_signatures(lines: str) -> tuple[Signature, ...]:
    """Reads signature lines, as in a note and a witness's answer.

    Raises:
        TransparencyError: there is none, there are too many, or one cannot be read.
    """
    signatures = tuple(map(_parse_signature, lines.removesuffix("\n").split("\n")))
    if len(signatures) > MAX_SIGNATURES:
        raise TransparencyError(Reason.TOO_LARGE, f"a signed note has {MAX_SIGNATURES} signatures at most")
    return signatures


def cosign(text: str, key: PrivateKey, time: int) -> Signature:
    """Cosigns a checkpoint's text.

    Args:
        text: the note's text, without signatures.
        key: of the kind COSIGNATURE.
        time: Unix time in whole seconds.
    """
    if key.kind is not Kind.COSIGNATURE:
        raise ValueError("a witness's key is of the kind COSIGNATURE")
    return Signature(key.name, key.public.key_id, struct.pack(">Q", time) + key.sign(_cosigned(text, time)))


def cosigned_at(note: Note, keys: Iterable[PublicKey]) -> dict[PublicKey, int]:
    """Returns when each of these witnesses cosigned the note; others are omitted.

    Raises:
        TransparencyError: a cosignature claims to be by one of the keys but is not.
    """
    times: dict[PublicKey, int] = {}
    for key in keys:
        for signature in note.signatures:
            if not signature.is_by(key):
                continue
            if len(signature.signature) != 72:
                raise TransparencyError(Reason.BAD_SIGNATURE, f"the cosignature in the name of {key.name} has a wrong length")
            (time,) = struct.unpack(">Q", signature.signature[:8])
            if time >= 2**63 or not key.verify(signature.signature[8:], _cosigned(note.text, time)):
                raise TransparencyError(Reason.BAD_SIGNATURE, f"the cosignature in the name of {key.name} is false")
            times[key] = max(time, times.get(key, 0))
    return times


def _cosigned(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()


def _parse_signature(line: str) -> Signature:
    name, _, encoded = line.removeprefix(_DASH).partition(" ")
    data = _decode64(encoded)
    if not line.startswith(_DASH) or data is None or len(data) <= 4:
        raise TransparencyError(Reason.MALFORMED, "a signature line of the note cannot be read")
    _check_name(name)
    return Signature(name, data[:4], data[4:])


def _split_key(text: str, what: str) -> tuple[str, Kind, bytes, str]:
    parts = text.split("+", 2)  # base64 may contain plus signs; a name has none
    data = _decode64(parts[2]) if len(parts) == 3 else None
    if data is None or len(data) != 33 or data[0] not in tuple(Kind):
        raise TransparencyError(Reason.MALFORMED, f"a {what} is written name+id+base64, with an Ed25519 key of kind 1 or 4")
    _check_name(parts[0])
    return parts[0], Kind(data[0]), data[1:], parts[1]


def _check_name(name: str) -> None:
    bad = any(character.isspace() or character < " " or character == "+" for character in name)
    if bad or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise TransparencyError(Reason.MALFORMED, "a key's name has no white space and no plus sign, and is not too long")


def _encode64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode64(text: str) -> bytes | None:
    """None unless this is the canonical encoding of these bytes."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if _encode64(data) == text else None


# Checkpoints (C2SP tlog-checkpoint): a log's name, size and root, as the text of a signed note. No I/O, no clock.


_SIZE = re.compile(r"(0|[1-9][0-9]{0,15})\Z")


@dataclass(frozen=True)
class Checkpoint:
    """A log's signed statement of its state.

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

    Extension lines are refused: the tree does not cover them, so a log could mark each client's copy with them.

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
