"""Reads a SentencePiece model file (tokenizer.model): a protocol-buffers message, of which only what encoding needs is kept.

Field numbers are those of sentencepiece_model.proto (Kudo and Richardson 2018); the wire format is that of
https://protobuf.dev/programming-guides/encoding. No I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from cloister.types.errors import ModelError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5

Value = int | bytes
Message = dict[int, Value]
"""The last value of each field."""


class PieceKind(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelKind(IntEnum):
    """How text becomes pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    """What a model file says.

    Attributes:
        byte_fallback: letters without a piece become byte pieces.
        suffixes_space: spaces end words in place of beginning them.
        unk_id, bos_id, eos_id: None where the model has none.
        charsmap: the compiled table that normalises letters, empty for none.
        denormalizes: there is a table for decoding too.
        adds_prefix: a space is put before a text.
        removes_spaces: leading, trailing and doubled spaces are dropped.
        escapes_spaces: a space is written `▁`.
    """

    kind: ModelKind
    pieces: Sequence[SentencePiece]
    byte_fallback: bool
    suffixes_space: bool
    unk_id: int | None
    bos_id: int | None
    eos_id: int | None
    charsmap: bytes
    denormalizes: bool
    adds_prefix: bool
    removes_spaces: bool
    escapes_spaces: bool


def read_model(data: bytes) -> SentencePieceFile:
    """Reads the bytes of a model file.

    Raises:
        ModelError: they are no such file, or a damaged one.
    """
    try:
        return _read_model(data)
    except (ValueError, LookupError, TypeError, struct.error):
        raise ModelError("tokenizer.model is not a SentencePiece model, or is damaged; download it again") from None


def _read_model(data: bytes) -> SentencePieceFile:
    pieces: list[SentencePiece] = []
    parts: Message = {}
    for number, value in _fields(data):
        if number == _PIECES:
            pieces.append(_piece(dict(_fields(_as_bytes(value)))))
        else:
            parts[number] = value
    if not pieces:
        raise ValueError
    trainer, normalizer, denormalizer = (
        dict(_fields(_as_bytes(parts.get(number, b"")))) for number in (_TRAINER, _NORMALIZER, _DENORMALIZER)
    )

    def token(field: int, default: int) -> int | None:
        token_id = _as_signed(trainer.get(field, default))
        return token_id if 0 <= token_id < len(pieces) else None

    return SentencePieceFile(
        kind=ModelKind(_as_signed(trainer.get(3, ModelKind.UNIGRAM))),
        pieces=pieces,
        byte_fallback=bool(trainer.get(35, 0)),
        suffixes_space=bool(trainer.get(24, 0)),
        unk_id=next((place for place, piece in enumerate(pieces) if piece.kind == PieceKind.UNKNOWN), None),
        bos_id=token(41, 1),
        eos_id=token(42, 2),
        charsmap=_check_charsmap(_as_bytes(normalizer.get(2, b""))),
        denormalizes=bool(denormalizer.get(2)),
        adds_prefix=bool(normalizer.get(3, 1)),
        removes_spaces=bool(normalizer.get(4, 1)),
        escapes_spaces=bool(normalizer.get(5, 1)),
    )


def _check_charsmap(charsmap: bytes) -> bytes:
    """The size of its trie stands first: what reads it makes room for so much before it looks at how much there is."""
    if charsmap:
        (size,) = struct.unpack_from("<I", charsmap)
        if size % 4 or size > len(charsmap) - 4:
            raise ValueError
    return charsmap


def _piece(fields: Message) -> SentencePiece:
    (score,) = struct.unpack("<f", _as_bytes(fields.get(2, b"\0\0\0\0")))
    return SentencePiece(_as_bytes(fields[1]).decode(), score, PieceKind(_as_signed(fields.get(3, PieceKind.NORMAL))))


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yields (field number, value) of a message: an integer, or the bytes of everything else."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == _VARINT:
            number, place = _varint(data, place)
            yield key >> 3, number
            continue
        if kind == _BYTES:
            size, place = _varint(data, place)
        else:
            size = {_FIXED32: 4, _FIXED64: 8}.get(kind, -1)
        if size < 0 or place + size > len(data):
            raise ValueError
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns a number of seven bits a byte, lowest first, and the place after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
    raise ValueError


def _as_signed(value: Value) -> int:
    """Reads a number of 64 bits that may be negative (-1 says that there is no such token)."""
    if isinstance(value, bytes):
        raise TypeError
    return value - (1 << 64) if value >= 1 << 63 else value


def _as_bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError
    return value
