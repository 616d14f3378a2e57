"""A SentencePiece model (tokenizer.model) as tokenizer.json would have it; the tokenizers library then does the work.

A stretch of text between control tokens becomes the pieces that SentencePiece makes of it: normalised, one space before it
where the model wants one, symbols that the model's makers defined left whole, and the rest by unigram or BPE.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cloister.text.framing import surround
from cloister.text.sentencepiece_file import ModelKind, PieceKind, SentencePiece, SentencePieceFile, read_model
from cloister.types.errors import ModelError

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
    model = read_model(data)
    _refuse_unsupported(model)
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
        raise ModelError(f"the tokenizer has a piece of more than {_MOST_LETTERS} letters; download it again")
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


def _refuse_unsupported(model: SentencePieceFile) -> None:
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
            raise ModelError(f"tokenizer.model is a tokenizer {what}, which is not supported; use one with tokenizer.json")


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
        steps += [_replace({"Regex": r"\A +| +\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
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
