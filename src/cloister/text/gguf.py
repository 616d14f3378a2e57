"""Converts the tokenizer and chat templates in a GGUF file's metadata to tokenizer.json.

The tokenizers library then does the work, as for any other model. Kinds: "gpt2" is byte-level BPE, whose words a regular
expression with a name cuts out; "llama" is SentencePiece's BPE, whose merges follow from its scores; "bert" is WordPiece,
and "t5" SentencePiece's unigram.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cloister.text.sentencepiece import (
    ModelKind,
    PieceKind,
    SentencePiece,
    SentencePieceFile,
    check_charsmap,
    convert_pieces,
    merges_by_score,
)
from cloister.text.spelling import SPLITS, surround
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFArray, GGUFFile, read_gguf

# Caches the converted vocabulary of a GGUF file, and the text of each token of any large vocabulary, for the next start.
#
# SentencePiece's merges follow from two million places where a vocabulary of 262,000 pieces can be cut, 2 s of work for each
# process.


_FORMAT: Final = 2
"""Raise it when the same metadata comes to another tokenizer: files of the old number are then not used."""
_LEAST_BYTES: Final = 1 << 20
_MOST_FILES: Final = 8
_TOKENIZERS: Final = ".tokenizer"
_TEXTS: Final = ".tokens"


T = TypeVar("T")


class TokenizerRecord(msgspec.Struct, frozen=True):
    """What `text.source.TextSource` says of a tokenizer.

    Attributes:
        head: tokenizer.json beside its vocabulary.
        config: tokenizer_config.json.
        content: all of tokenizer.json, JSON.
    """

    head: dict[str, Any]
    config: dict[str, Any]
    content: bytes


class TokenizerStore:
    """Tokenizers, and texts of their tokens, in files that only this user may read; of each the eight that were used last stay.

    Args:
        directory: made when the first one is saved.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, identity: str) -> TokenizerRecord | None:
        """Returns the one that was saved under `identity`; None when there is none that is whole and of this format."""
        return self._load(self._path(identity, _TOKENIZERS), TokenizerRecord)

    @staticmethod
    def is_worth_it(content: bytes) -> bool:
        """Whether a tokenizer.json is so large that what is made of it is kept."""
        return len(content) >= _LEAST_BYTES

    def load_texts(self, identity: str) -> list[str | None] | None:
        """Returns the texts of tokens by id that were saved under `identity`; None as from `load`."""
        return self._load(self._path(identity, _TEXTS), list[str | None])

    def _load(self, path: Path, kind: type[T]) -> T | None:
        try:
            digest, _, encoded = path.read_bytes().partition(b"\n")
            if hashlib.sha256(encoded).hexdigest().encode() != digest:
                return None
            os.utime(path)
            return msgspec.msgpack.decode(encoded, type=kind)
        except (OSError, ValueError):
            return None

    def save(self, identity: str, made: TokenizerRecord) -> bool:
        """Writes one; returns False when it is too small to be worth it, or there is no room or no right to write."""
        return self.is_worth_it(made.content) and self._save(self._path(identity, _TOKENIZERS), made)

    def save_texts(self, identity: str, texts: Sequence[str | None]) -> bool:
        """Writes the texts of tokens; returns False when there is no room or no right to write."""
        return self._save(self._path(identity, _TEXTS), texts)

    def _save(self, path: Path, made: object) -> bool:
        encoded = msgspec.msgpack.encode(made)
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(hashlib.sha256(encoded).hexdigest().encode() + b"\n")
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())  # a power cut must not leave the name without the bytes
            scratch.replace(path)
            others = sorted(self._directory.glob(f"*{path.suffix}"), key=lambda file: file.stat().st_mtime_ns)
            for old in others[:-_MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError:
            return False
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
        return True

    def _path(self, identity: str, suffix: str = _TOKENIZERS) -> Path:
        name = hashlib.sha256(f"{_FORMAT}\0{identity}".encode()).hexdigest()[:32]
        return self._directory / f"{name}{suffix}"


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_TEMPLATE = "tokenizer.chat_template"
_NAMED: Final[Mapping[str, str]] = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
    "mask_token": "mask", "cls_token": "cls",
}  # fmt: skip
"""Roles, and how the format spells them."""


class GGUFSource:
    """A GGUF file (protocol `text.source.TextSource`).

    Args:
        store: keeps what is made of its vocabulary.
    """

    def __init__(self, path: Path, store: TokenizerStore | None = None) -> None:
        self._path, self._store = path, store

    def tokenizer(self) -> dict[str, Any]:
        if self._store is not None:
            settings: dict[str, Any] = msgspec.json.decode(self._made.content)
            return settings
        return self._convert()

    def _convert(self) -> dict[str, Any]:
        """Returns tokenizer.json as it follows from the metadata."""
        kind = self._file.get("tokenizer.ggml.model", str) or "none"
        if kind not in _KINDS:
            raise ModelError(f"{self._path.name} has a tokenizer of kind {kind!r}; supported are: {', '.join(_KINDS)}")
        return _KINDS[kind](self._file, self._vocabulary)

    def tokenizer_text(self) -> tuple[dict[str, Any], bytes]:
        return self._made.head, self._made.content

    def config(self) -> dict[str, Any]:
        return self._made.config

    @cached_property
    def _made(self) -> TokenizerRecord:
        identity = self._identity() if self._store is not None else ""
        made = self._store.load(identity) if self._store is not None else None
        if made is None:
            settings = self._convert()
            head = {name: value for name, value in settings.items() if name != "model"}
            made = TokenizerRecord(head, self._config(), msgspec.json.encode(settings))
            if self._store is not None:
                self._store.save(identity, made)
        return made

    def _identity(self) -> str:
        """Returns a digest (hex) of all metadata that a tokenizer is made of."""
        digest = hashlib.sha256()
        for key, value in sorted(self._file.metadata.items()):
            if key.startswith("tokenizer.") and not key.startswith(_TEMPLATE):
                told, raw = (
                    (f"{value.kind} {value.num_items}", value.raw) if isinstance(value, GGUFArray) else (repr(value), b"")
                )
                digest.update(f"{key}\0{told}\0{len(raw)}\0".encode() + raw)
        return digest.hexdigest()

    def _config(self) -> dict[str, Any]:
        tokens = self._vocabulary.tokens
        ids = {role: _token_id(self._file, name, len(tokens)) for role, name in _NAMED.items()}
        return {role: tokens[token_id] for role, token_id in ids.items() if token_id is not None}

    def templates(self) -> dict[str, str]:
        """Returns those in the file's metadata; chat_template.jinja beside the file goes over its default one."""
        names = [key for key in self._file.metadata if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")]
        sources = {name.removeprefix(_TEMPLATE).removeprefix(".") or "default": self._file.get(name, str) for name in names}
        found = {name: source for name, source in sources.items() if source is not None}
        beside = self._path.parent / "chat_template.jinja"
        return found | ({"default": beside.read_text(encoding="utf-8")} if beside.is_file() else {})

    @cached_property
    def _file(self) -> GGUFFile:
        return read_gguf(self._path)

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        return _read_vocabulary(self._file)


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens by id.

    Attributes:
        kinds: what each token is (`_NORMAL` and so on).
    """

    tokens: Sequence[str]
    kinds: Sequence[int]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id, without the places that are only filled up."""
        pairs = zip(self.tokens, self.kinds, strict=True)
        return {token: token_id for token_id, (token, kind) in enumerate(pairs) if kind != _UNUSED and token}

    def added(self) -> list[dict[str, Any]]:
        """The `added_tokens` of tokenizer.json: what is found in a text before anything else is."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": token_id, "content": token, "special": kind != _USER_DEFINED, **flags}
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]


def _read_vocabulary(file: GGUFFile) -> _Vocabulary:
    tokens = file.strings("tokenizer.ggml.tokens") or []
    kinds = file.numbers("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocabulary = _Vocabulary(tokens, kinds)
    if not tokens or len(kinds) != len(tokens) or len(vocabulary.ids) != sum(map(_is_used, tokens, kinds)):
        raise ModelError(f"{file.path.name} has no token list, or a damaged one; download or copy it again")
    return vocabulary


def _is_used(token: str, kind: int) -> bool:
    return kind != _UNUSED and bool(token)


def _token_id(file: GGUFFile, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = file.get(key, int)
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise ModelError(f"{key!r} in {file.path.name} is no id of its token list", param=key)
    return token_id


def _byte_level(file: GGUFFile, vocabulary: _Vocabulary) -> dict[str, Any]:
    name = file.get("tokenizer.ggml.pre", str) or ""
    if name not in SPLITS:
        found = f"splits text in a way that is not supported ({name!r})" if name else "names no way to split text"
        raise ModelError(
            f"{file.path.name} {found}; supported are: {', '.join(SPLITS)}. Get a newer conversion, or safetensors"
        )
    split = SPLITS[name]
    merges = file.strings("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError(f"{file.path.name} has a byte-level tokenizer without merges; convert the model again")
    pairs = [merge.split(" ", 1) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelError(
            f"'tokenizer.ggml.merges' in {file.path.name} holds something else than pairs; download or copy it again"
        )
    return {
        **_frame(file, vocabulary, adds_bos=split.adds_bos),
        "normalizer": {"type": "NFC"} if split.normalizes else None,
        "pre_tokenizer": split.as_json(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, pairs, ignore_merges=split.takes_whole_words),
    }


def _sentence_piece(file: GGUFFile, vocabulary: _Vocabulary) -> dict[str, Any]:
    """Llama 2's: spaces are `▁`, one is put before a text, and bytes stand for letters that the vocabulary lacks."""
    if file.get("tokenizer.ggml.remove_extra_whitespaces", bool):
        raise ModelError(f"{file.path.name} has a tokenizer that removes spaces, which is not supported; use safetensors")
    scores = _scores_of(file, vocabulary)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    unknown = _token_id(file, "unknown", len(vocabulary.tokens))
    options = {
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "fuse_unk": True,
        "byte_fallback": True,
    }
    return {
        **_frame(file, vocabulary, adds_bos=True),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), replace],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*decoders, *([strip] if prefix else [])]},
        "model": _bpe(vocabulary, _merges_of(vocabulary, scores), **options),
    }


def _word_piece(file: GGUFFile, vocabulary: _Vocabulary) -> dict[str, Any]:
    """BERT's: a file marks pieces that begin a word with `▁`, where BERT marks those that do not, with `##`."""
    pieces = [
        token if kind != _NORMAL else token[1:] if token.startswith("▁") else f"##{token}"
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    adds = {name: file.get(f"tokenizer.ggml.add_{name}_token", bool) for name in ("bos", "eos", "sep")}
    is_begun = adds["bos"] is not False
    before = _around(file, vocabulary, "bos", is_begun) or _around(file, vocabulary, "cls", is_begun)
    is_ended = adds["sep"] is not False or adds["eos"] is True
    after = _around(file, vocabulary, "seperator", is_ended) or _around(file, vocabulary, "eos", is_ended)
    unknown = _token_id(file, "unknown", len(pieces))
    return {
        "version": "1.0",
        "added_tokens": vocabulary.added(),
        "post_processor": surround(before, after),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": file.get("tokenizer.ggml.normalizer.strip_accents", bool),
            "lowercase": file.get("tokenizer.ggml.normalizer.lowercase", bool) is not False,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "vocab": {piece: number for number, piece in enumerate(pieces)},
            "unk_token": "[UNK]" if unknown is None else pieces[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    }


def _unigram(file: GGUFFile, vocabulary: _Vocabulary) -> dict[str, Any]:
    """SentencePiece's unigram (XLM-RoBERTa), with its table that normalises letters."""
    scores = _scores_of(file, vocabulary)
    table = file.metadata.get("tokenizer.ggml.precompiled_charsmap")
    num_used = max(place for place, kind in enumerate(vocabulary.kinds, 1) if kind != _UNUSED)  # behind them are empty places
    try:
        pieces = [
            SentencePiece(token, score, PieceKind(kind))
            for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.kinds[:num_used], strict=False)
        ]
        charsmap = check_charsmap(table.as_bytes() if isinstance(table, GGUFArray) else b"")
    except (ValueError, struct.error):
        raise ModelError(f"the tokenizer of {file.path.name} is damaged; download or copy it again") from None
    adds = {f"add_{name}_token": file.get(f"tokenizer.ggml.add_{name}_token", bool) for name in ("bos", "eos")}
    model = SentencePieceFile(
        kind=ModelKind.UNIGRAM,
        pieces=pieces,
        byte_fallback=any(piece.kind is PieceKind.BYTE for piece in pieces),
        suffixes_space=False,
        unk_id=next((place for place, piece in enumerate(pieces) if piece.kind is PieceKind.UNKNOWN), None),
        bos_id=_token_id(file, "bos", num_used),
        eos_id=_token_id(file, "eos", num_used),
        charsmap=charsmap,
        denormalizes=False,
        adds_prefix=file.get("tokenizer.ggml.add_space_prefix", bool) is not False,
        removes_spaces=bool(file.get("tokenizer.ggml.remove_extra_whitespaces", bool)),
        escapes_spaces=True,
    )
    config = {"add_bos_token": bool(adds["add_bos_token"]), "add_eos_token": adds["add_eos_token"] is not False}
    return convert_pieces(model, config, file.path.name)


def _scores_of(file: GGUFFile, vocabulary: _Vocabulary) -> list[float]:
    scores = file.numbers("tokenizer.ggml.scores") or []
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{file.path.name} needs one score for each token of its tokenizer; download or copy it again")
    return scores


def _merges_of(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    pairs = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    return merges_by_score({token: token_id for token_id, (token, kind) in enumerate(pairs) if kind == _NORMAL}, scores)


def _bpe(vocabulary: _Vocabulary, merges: Sequence[Sequence[str]], **options: Any) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocabulary.ids, "merges": [list(pair) for pair in merges], **options}


def _frame(file: GGUFFile, vocabulary: _Vocabulary, *, adds_bos: bool) -> dict[str, Any]:
    """What does not depend on the kind: the added tokens, and what is put around a plain text."""
    asked = file.get("tokenizer.ggml.add_bos_token", bool)
    before = _around(file, vocabulary, "bos", adds_bos if asked is None else asked)
    after = _around(file, vocabulary, "eos", bool(file.get("tokenizer.ggml.add_eos_token", bool)))
    return {"version": "1.0", "added_tokens": vocabulary.added(), "post_processor": surround(before, after)}


def _around(file: GGUFFile, vocabulary: _Vocabulary, name: str, wanted: bool) -> list[tuple[str, int]]:
    token_id = _token_id(file, name, len(vocabulary.tokens)) if wanted else None
    return [] if token_id is None else [(vocabulary.tokens[token_id], token_id)]


_KINDS: Final[Mapping[str, Callable[[GGUFFile, _Vocabulary], dict[str, Any]]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "bert": _word_piece,
    "t5": _unigram,
}
