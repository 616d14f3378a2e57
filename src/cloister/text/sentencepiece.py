"""Converts a SentencePiece model (tokenizer.model) to tokenizer.json, which the tokenizers library then runs.

A stretch of text between control tokens becomes the pieces that SentencePiece makes of it: normalised, one space before it
where the model wants one, symbols that the model's makers defined left whole, and the rest by unigram or BPE.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from cloister.text.spelling import surround
from cloister.types.errors import ModelError

# Reads a SentencePiece model file (tokenizer.model): a protocol-buffers message, of which only what encoding needs is kept.
#
# Field numbers are those of sentencepiece_model.proto (Kudo and Richardson 2018); the wire format is that of
# https://protobuf.dev/programming-guides/encoding. No I/O.


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5

Value = int | bytes
Message = dict[int, Value]
"""The last value of each field."""


class PieceKind(IntEnum):
    """The kinds of pieces."""

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
    """The contents of a model file.

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
        raise ModelError("tokenizer.model is not a SentencePiece model, or is damaged; download or copy it again") from None


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
        charsmap=check_charsmap(_as_bytes(normalizer.get(2, b""))),
        denormalizes=bool(denormalizer.get(2)),
        adds_prefix=bool(normalizer.get(3, 1)),
        removes_spaces=bool(normalizer.get(4, 1)),
        escapes_spaces=bool(normalizer.get(5, 1)),
    )


def check_charsmap(charsmap: bytes) -> bytes:
    """Returns the table.

    The size of its trie stands first: what reads it makes room for so much before it looks at how much there is.

    Raises:
        ValueError, struct.error: that is no size that it can have.
    """
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


_SPACE: Final = "▁"
_MOST_LETTERS: Final = 1024  # of a piece; the longest in use are runs of some 100 spaces
_BYTE_NAME: Final = r"<(?=0x[0-9A-Fa-f]{2}>)"
_SYMBOL_SCORE: Final = -0.1  # as near to certain as SentencePiece's unigram makes a symbol, whatever its length


def convert_model(data: bytes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of tokenizer.json for a model file.

    Args:
        config: tokenizer_config.json: `add_prefix_space` false leaves out the space before a text, `legacy` false puts it
            only where nothing at all stands before; `add_bos_token` and `add_eos_token` say what is put around a text
            (unset, BOS before it).

    Raises:
        ModelError: the file is damaged, or asks for something that is not supported.
    """
    return convert_pieces(read_model(data), config)


def convert_pieces(model: SentencePieceFile, config: Mapping[str, Any], source: str = "tokenizer.model") -> dict[str, Any]:
    """As `convert_model`, of what a file says; `source` is what messages call that."""
    _refuse_unsupported(model, source)
    adds_prefix = model.adds_prefix and config.get("add_prefix_space") is not False
    only_first = adds_prefix and config.get("legacy") is False
    bos = model.bos_id if config.get("add_bos_token") is not False else None
    eos = model.eos_id if config.get("add_eos_token") else None
    return {
        "version": "1.0",
        "added_tokens": [_added(model, token_id) for token_id in _added_ids(model)],
        "normalizer": _normalizer(model, adds_prefix=adds_prefix and not only_first),
        "pre_tokenizer": _pre_tokenizer(model, only_first=only_first),
        "post_processor": surround(_token(model, bos), _token(model, eos)),
        "decoder": _decoder(strips=adds_prefix or model.removes_spaces),
        "model": _unigram(model) if model.kind is ModelKind.UNIGRAM else _bpe(model),
    }


def named_tokens(data: bytes) -> dict[str, str]:
    """Returns role -> text of the tokens that a model file names: "bos_token", "eos_token", "unk_token"."""
    model = read_model(data)
    ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
    return {role: model.pieces[token_id].text for role, token_id in ids.items() if token_id is not None}


def merges_by_score(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns every way to make a piece of two others, best piece first.

    SentencePiece's BPE has no list of merges: of all neighbours it joins those whose piece has the best score.

    Args:
        ids: piece -> id, of the pieces that take part.
        scores: by id.

    Raises:
        ModelError: a piece is so long that a list of its parts would fill the memory.
    """
    if any(len(piece) > _MOST_LETTERS for piece in ids):
        raise ModelError(f"the tokenizer has a piece of more than {_MOST_LETTERS} letters; download or copy it again")
    pieces = sorted(ids, key=lambda piece: (-scores[ids[piece]], ids[piece]))
    merges: list[tuple[str, str]] = []
    for piece in pieces:  # one loop: a vocabulary of 262,000 has two million places to cut
        ways = []
        for place in range(1, len(piece)):
            first = ids.get(piece[:place])
            if first is not None and (second := ids.get(piece[place:])) is not None:
                ways.append((first, second, place))
        ways.sort()
        merges += [(piece[:place], piece[place:]) for _, _, place in ways]
    return merges


def _token(model: SentencePieceFile, token_id: int | None) -> list[tuple[str, int]]:
    return [] if token_id is None else [(model.pieces[token_id].text, token_id)]


def _refuse_unsupported(model: SentencePieceFile, source: str) -> None:
    refused = {
        f"of the kind {model.kind.name.lower()}": model.kind not in (ModelKind.UNIGRAM, ModelKind.BPE),
        "without a piece for unknown letters": model.unk_id is None and model.kind is ModelKind.UNIGRAM,
        "that puts spaces behind words": model.suffixes_space,
        "that leaves spaces as they are": not model.escapes_spaces,
        "that changes text when it decodes": model.denormalizes,
        "with pieces that are switched off": any(piece.kind == PieceKind.UNUSED for piece in model.pieces),
        "with two pieces of one spelling": len({piece.text for piece in model.pieces}) != len(model.pieces),
    }
    for what, applies in refused.items():
        if applies:
            raise ModelError(f"{source} is a tokenizer {what}, which is not supported; use one with tokenizer.json")


def _added_ids(model: SentencePieceFile) -> list[int]:
    kinds = {PieceKind.UNKNOWN, PieceKind.CONTROL}
    if model.kind is ModelKind.BPE:  # whose symbols are never parts of merges; unigram's are pieces among others
        kinds.add(PieceKind.USER_DEFINED)
    return [token_id for token_id, piece in enumerate(model.pieces) if piece.kind in kinds and piece.text]


def _added(model: SentencePieceFile, token_id: int) -> dict[str, Any]:
    """An entry of `added_tokens`. A symbol that the makers defined is looked for in normalised text, as SentencePiece does,
    unless normalising would change it."""
    piece = model.pieces[token_id]
    is_symbol = piece.kind == PieceKind.USER_DEFINED
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    normalized = is_symbol and _normalize(model, piece.text) == piece.text
    return {"id": token_id, "content": piece.text, "special": not is_symbol, "normalized": normalized, **flags}


def _normalize(model: SentencePieceFile, text: str) -> str:
    """Returns a text as the model's table and its dropping of spaces leave it."""
    if model.charsmap:
        from tokenizers.normalizers import Precompiled

        text = str(Precompiled(model.charsmap).normalize_str(text))
    return re.sub(" +", " ", text.strip(" ")) if model.removes_spaces else text


def _normalizer(model: SentencePieceFile, *, adds_prefix: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.removes_spaces:
        # Doubled ones first: ` +\z` would try every place of a run of spaces, and a run of a million would take half an hour.
        steps += [_replace({"Regex": " {2,}"}, " "), _replace({"Regex": r"\A | \z"}, "")]
    if adds_prefix:
        steps.append(_prefix(model))
    return {"type": "Sequence", "normalizers": [*steps, _replace({"String": " "}, _SPACE)]}


def _prefix(model: SentencePieceFile) -> dict[str, Any]:
    """A space before a text. The library normalises symbols as if they were texts, and those must stay what they are."""
    symbols = [piece.text for piece in model.pieces if piece.kind == PieceKind.USER_DEFINED]
    if not symbols or model.kind is ModelKind.UNIGRAM:
        return {"type": "Prepend", "prepend": _SPACE}
    either = "|".join(re.escape(symbol) for symbol in symbols)
    return _replace({"Regex": rf"\A(?!(?:{either})?\z)"}, _SPACE)


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _pre_tokenizer(model: SentencePieceFile, *, only_first: bool) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []
    if model.kind is ModelKind.UNIGRAM and model.byte_fallback:
        # Without this the library would take the spelling of a byte piece in a text for that byte.
        steps.append({"type": "Split", "pattern": {"Regex": _BYTE_NAME}, "behavior": "Isolated", "invert": False})
    if only_first:
        steps.insert(0, {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False})
    return {"type": "Sequence", "pretokenizers": steps} if steps else None


def _decoder(*, strips: bool) -> dict[str, Any]:
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = [_replace({"String": _SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {"type": "Sequence", "decoders": [*steps, *([strip] if strips else [])]}


def _unigram(model: SentencePieceFile) -> dict[str, Any]:
    """Unigram (Kudo 2018). The library takes 10 off the lowest score for an unknown letter, as SentencePiece does, whose
    control and byte pieces have no score that counts."""
    vocab = [[piece.text, _score(piece)] for piece in model.pieces]
    return {"type": "Unigram", "unk_id": model.unk_id, "vocab": vocab, "byte_fallback": model.byte_fallback}


def _score(piece: SentencePiece) -> float:
    if piece.kind == PieceKind.NORMAL:
        return piece.score
    return _SYMBOL_SCORE if piece.kind == PieceKind.USER_DEFINED else 0.0


def _bpe(model: SentencePieceFile) -> dict[str, Any]:
    ids = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    normal = {piece.text: token_id for token_id, piece in enumerate(model.pieces) if piece.kind == PieceKind.NORMAL}
    return {
        "type": "BPE",
        "vocab": ids,
        "merges": [list(pair) for pair in merges_by_score(normal, [piece.score for piece in model.pieces])],
        "unk_token": None if model.unk_id is None else model.pieces[model.unk_id].text,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
    }
