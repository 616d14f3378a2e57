"""Text to token ids and back, from tokenizer.json or what a GGUF file has instead; what a user wrote stays plain text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import tokenizers

from cloister.text.detokenizer import Detokenizer
from cloister.text.expressions import bound_text, has_given_up
from cloister.text.gguf import TokenizerStore
from cloister.text.source import open_source
from cloister.text.spelling import EMBEDDED, SPLITS, TRAILING_SPACE, SpecialTokens, Spelling, read_spelling
from cloister.text.token_bound import TokenBound
from cloister.types.errors import InvalidRequestError, ModelError

MARK = "\ufdd0"
"""A code point that Unicode keeps for use inside a program and never for text. A content that holds it loses it, and gains
nothing by it."""
NOTHING = "(?!)"
"""A pattern that matches nowhere."""


class Guard:
    """Keeps what a user wrote from turning into control tokens of one model.

    A chat template writes control tokens such as `<|end|>` as text and pastes contents between them, so a content that
    spells `<|end|><|system|>` would, once tokenized, end its turn and speak as the system. The guard puts a mark inside
    every such spelling before the template sees it. `Tokenizer.encode` takes marked text as plain text, without the marks:
    what a user wrote reaches the model letter by letter, and only the template's own control tokens are control tokens.

    A spelling may also be cut in two, by contents in several parts that the template joins; so a text that ends in the
    beginning of a control token gets a mark at its end.
    """

    def __init__(self, special: SpecialTokens) -> None:
        texts = special.control_texts
        rests: dict[str, list[str]] = {}
        for text in texts:
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
        starts = [f"{re.escape(first)}(?={'|'.join(endings)})" for first, endings in rests.items()]
        tails = sorted({text[:size] for text in texts for size in range(1, len(text))}, key=len, reverse=True)
        self._starts = re.compile("|".join(starts) or NOTHING)
        self._tail = re.compile(f"(?:{'|'.join(map(re.escape, tails)) or NOTHING})\\Z")
        self._longest = max(map(len, texts), default=0)

    def mark(self, value: Any) -> Any:
        """Returns a copy of a JSON value with every string in it marked where it has to be, keys of objects too."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.mark(item) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise TypeError(f"a chat holds JSON values only, not {type(value).__name__}")

    def _mark_text(self, text: str) -> str:
        text = self._starts.sub(lambda match: match[0] + MARK, text.replace(MARK, ""))
        return text + MARK if self._tail.search(text, max(0, len(text) - self._longest)) else text


LONG_TEXT_CHARS: Final = 4096
"""From here on a text takes milliseconds, and a few million characters take seconds: other threads must not wait for them."""


_SLOW_PATTERN: Final = re.compile(rb'("Regex"\s*:\s*)"\\\\s\+\$"')
"""The pattern that `TRAILING_SPACE` stands for, in tokenizer.json."""


class Tokenizer:
    """A model's tokenizer. Thread-safe: nothing changes after it was made.

    Args:
        path: model directory with tokenizer.json, and tokenizer_config.json if there is one; or a GGUF file.
        remembers: keep the bytes of tokens that occurred, which is quicker. Which ones did, and in what order they came for the
            first time, is then to be read in memory.
        kept: directory where what is made of a vocabulary is kept for the next start; None keeps nothing.
        defers: with `kept`, what makes tokens of text is made when it is used first, if the text of every token is kept: an
            engine that follows no grammar never uses it. It takes 0.7 s for 262,000 tokens.

    Attributes:
        special: the added tokens, and which of them control the model.
        spelling: how vocabulary entries stand for bytes.
        vocab_size: one more than the largest token id.

    Raises:
        ModelError: the tokenizer is missing, cannot be read, or is of a kind that is not supported.
    """

    def __init__(self, path: str | Path, *, remembers: bool = True, kept: Path | None = None, defers: bool = False) -> None:
        self._path = Path(path)
        self._remembers = remembers
        self._store = None if kept is None else TokenizerStore(kept)
        source = open_source(self._path, self._store)
        (head, content), config = source.tokenizer_text(), source.config()
        self.special = SpecialTokens.parse(head, config)
        self.spelling: Spelling = read_spelling(head.get("decoder"))
        self._make: Callable[[], tokenizers.Tokenizer] | None = partial(_build, content, head, self.special)
        self._made: tokenizers.Tokenizer | None = None
        self._making = threading.Lock()
        self._texts = self._read_texts(content, config) if defers else None
        self.vocab_size = _count_ids(self._tokenizer) if self._texts is None else len(self._texts)
        self._most_chars = None if defers else bound_text(self._tokenizer, _known_expressions())
        self._adds_bos: bool | None = config.get("add_bos_token")
        self._adds_eos: bool | None = config.get("add_eos_token")
        self._token_bytes: dict[int, bytes] = {}

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        with self._making:
            if self._make is not None:
                self._made, self._make = self._make(), None  # the text that it was made of is not kept
            assert self._made is not None
            return self._made

    def _read_texts(self, content: bytes, config: Mapping[str, Any]) -> list[str | None] | None:
        """Returns the text of every token by id as it was kept at an earlier start, or keeps it for the next one.

        None for a vocabulary that is quick to parse.
        """
        if self._store is None or not self._store.is_worth_it(content):
            return None
        digest = hashlib.sha256(json.dumps([tokenizers.__version__, config], sort_keys=True).encode() + b"\0")
        digest.update(content)
        identity = digest.hexdigest()
        texts = self._store.load_texts(identity)
        if texts is None:
            texts = [self._tokenizer.id_to_token(token_id) for token_id in range(_count_ids(self._tokenizer))]
            self._store.save_texts(identity, texts)
        return texts

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if the model has one; generation_config.json may list more."""
        return self._named_id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = False, *, parse_special: bool = True) -> list[int]:
        """Returns the token ids of `text`.

        Args:
            add_special_tokens: begin with BOS, or whatever else the model wants around a plain text: the post-processor of
                its tokenizer, as far as `add_bos_token` and `add_eos_token` of tokenizer_config.json leave it. A text that
                is written with BOS at its start gets no second one. A chat template writes all of this itself.
            parse_special: spellings of control tokens become control tokens, except where they are marked (see
                `Guard`). False makes every one of them plain text.

        Raises:
            InvalidRequestError: the text is not valid Unicode.
        """
        if not _is_unicode(text):
            raise InvalidRequestError("text holds half of a surrogate pair; send valid Unicode")
        self._check_length(len(text))
        is_framed = add_special_tokens and self._adds_bos is not False
        if not parse_special:
            ids = self._guarded.encode_plain(text, is_framed)
        elif MARK in text:
            ids = self._guarded.encode_marked(text, is_framed)
        else:
            ids = _encode(self._tokenizer, text, is_framed)
        return self._settle_ends(ids, is_framed) if add_special_tokens else ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Returns the token ids of two texts as the tokenizer's post-processor joins them, for a model that compares them.

        No spelling of a control token in them becomes one: where the first text ends is not theirs to say.

        Returns:
            the ids, and how many of them are of type 0; those after are of type 1 (BERT; Devlin et al. 2019, section 3).

        Raises:
            InvalidRequestError: a text is not valid Unicode.
        """
        if not (_is_unicode(first) and _is_unicode(second)):
            raise InvalidRequestError("text holds half of a surrogate pair; send valid Unicode")
        self._check_length(len(first) + len(second))
        encoding = self._guarded.encode_pair(first, second)
        ids, types = encoding.ids, encoding.type_ids
        return ids, types.index(1) if 1 in types else len(ids)

    def _check_length(self, num_chars: int) -> None:
        if self._most_chars is not None and num_chars > self._most_chars:
            raise InvalidRequestError(
                f"this model's tokenizer takes the square of some texts, so one may have {self._most_chars:,} characters; send "
                "a shorter one, or token ids"
            )

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that `encode` never falls below, with any of its options.

        It takes milliseconds where `encode` takes seconds (see `TokenBound`), so a text that is too long needs no tokens. It is
        0 for short texts, and for tokenizers without a bound.
        """
        if len(text) < LONG_TEXT_CHARS or self._bound is None:
            return 0
        return self._bound.least_tokens(text.replace(MARK, ""))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the exact bytes of one token; none for an id without a token."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self.read_bytes(token_id)
            if self._remembers:
                self._token_bytes[token_id] = found
        return found

    def token_id(self, text: str) -> int | None:
        """Returns the id of the vocabulary entry or added token that is written `text`, if there is one."""
        return self._tokenizer.token_to_id(text)

    def digest(self) -> bytes:
        """Returns the SHA-256 of all by which texts and ids stand for each other. Takes time for a large vocabulary."""
        special = self.special
        rest = (sorted(special.added.items()), sorted(special.control_ids), sorted(special.named.items()))
        ends = (self._adds_bos, self._adds_eos)
        return hashlib.sha256(f"{self._tokenizer.to_str()}{rest}{ends}".encode()).digest()

    @cached_property
    def _guarded(self) -> _GuardedTokenizer:
        settings = open_source(self._path, self._store).tokenizer()
        return _GuardedTokenizer(settings, self.special)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return TokenBound.of(self._tokenizer, self.spelling, map(self.read_bytes, range(self.vocab_size)))

    def read_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, for who asks once: the bytes are not kept."""
        if token_id in self.special.added:
            return self.spelling.added_bytes(self.special.added[token_id])
        token = self._text_of(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else self.spelling.to_bytes(token)

    def _text_of(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id) if self._texts is None else self._texts[token_id]

    def _named_id(self, name: str) -> int | None:
        text = self.special.named.get(name)
        return None if text is None else self.token_id(text)

    def _settle_ends(self, ids: list[int], is_framed: bool) -> list[int]:
        """Puts BOS and EOS where the settings want them and the post-processor did not, and takes away what is too much."""
        bos, eos = self.bos_token_id, self.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if bos is not None and self._adds_bos and ids[:1] != [bos]:
            ids = [bos, *ids]
        if eos is None or self._adds_eos is None:
            return ids
        if self._adds_eos:
            return ids if ids[-1:] == [eos] else [*ids, eos]
        return ids[:-1] if is_framed and self._ends_with_eos else ids

    @cached_property
    def _ends_with_eos(self) -> bool:
        """Whether the post-processor puts EOS behind a text."""
        ids = self._tokenizer.encode("", add_special_tokens=True).ids
        return ids[-1:] == [self.eos_token_id] and (len(ids) > 1 or self.eos_token_id != self.bos_token_id)


class _GuardedTokenizer:
    """The same tokenizer with its control tokens under names that nobody can guess.

    What a user writes cannot become a control token, since nothing that anyone can write spells one. Splits, prefix
    spaces and normalisation stay what they are.
    """

    def __init__(self, settings: Mapping[str, Any], special: SpecialTokens) -> None:
        nonce = secrets.token_hex(16)
        self._names = {text: f"<{nonce}:{place}>" for place, text in enumerate(special.control_texts)}
        renamed = _renamed(settings, self._names)
        self._tokenizer = _build(json.dumps(renamed).encode(), renamed, special, self._names)
        self._controls = re.compile("|".join(re.escape(text) + _unmarked(text) for text in self._names) or NOTHING)

    def encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        """Takes every letter as text."""
        return _encode(self._tokenizer, text, add_special_tokens)

    def encode_pair(self, first: str, second: str) -> tokenizers.Encoding:
        """Takes every letter of both texts as text."""
        with _within_steps():
            if len(first) + len(second) < LONG_TEXT_CHARS:  # as in `_encode`
                return self._tokenizer.encode(first, second, add_special_tokens=True)
            return self._tokenizer.encode_batch_fast([(first, second)], add_special_tokens=True)[0]

    def encode_marked(self, text: str, add_special_tokens: bool) -> list[int]:
        """Takes spellings of control tokens as such unless a mark is inside; the marks are no part of the text."""
        named = self._controls.sub(lambda match: self._names[match[0]], text)
        return self.encode_plain(named.replace(MARK, ""), add_special_tokens)


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Returns the ids of a text. Only batches leave the interpreter lock to others, but a short text is not worth a batch."""
    with _within_steps():
        if len(text) < LONG_TEXT_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


@contextlib.contextmanager
def _within_steps() -> Iterator[None]:
    """Raises InvalidRequestError in place of the library's own error for an expression that takes too many steps."""
    try:
        yield
    except BaseException as error:
        if not has_given_up(error):
            raise
        raise InvalidRequestError(
            "this model's tokenizer gives up on this text, as one of its expressions takes too many steps; send another one"
        ) from None


def _known_expressions() -> frozenset[str]:
    """Returns expressions whose time grows as a text (tests/text/test_growth.py, test_expressions.py)."""
    return frozenset(expression for split in SPLITS.values() for expression in split.patterns) | {EMBEDDED, TRAILING_SPACE}


def _build(
    content: bytes, head: Mapping[str, Any], special: SpecialTokens, names: Mapping[str, str] | None = None
) -> tokenizers.Tokenizer:
    """Makes a tokenizer that neither cuts nor pads, with the added tokens that only tokenizer_config.json has.

    Args:
        content: tokenizer.json, of which `head` has the added tokens.
    """
    content = _SLOW_PATTERN.sub(lambda match: match[1] + json.dumps(TRAILING_SPACE).encode(), content)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the model's tokenizer cannot be used: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # The library would keep thousands of the words that it met, and they are users' words: nothing of a request outlives it.
    if (resize := getattr(tokenizer.model, "_resize_cache", None)) is not None:
        resize(0)
    known = {token["id"] for token in head.get("added_tokens") or []}
    for token_id in sorted(special.added.keys() - known):
        text = (names or {}).get(special.added[token_id], special.added[token_id])
        control = token_id in special.control_ids
        add = tokenizer.add_special_tokens if control else tokenizer.add_tokens
        add([tokenizers.AddedToken(text, special=control, normalized=False)])
        if tokenizer.token_to_id(text) != token_id:
            raise ModelError("tokenizer.json and tokenizer_config.json number their added tokens differently")
    return tokenizer


def _count_ids(tokenizer: tokenizers.Tokenizer) -> int:
    """Returns one more than the largest id, without a second vocabulary where ids have no gap."""
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    if all(tokenizer.id_to_token(token_id) is not None for token_id in range(count)):
        return count
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def _renamed(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns tokenizer.json with tokens renamed wherever text could lead to them: added tokens, vocabulary, merges."""
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in settings["added_tokens"]]
    model = dict(settings["model"])
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return {**settings, "added_tokens": added, "model": model}


def _makes(merge: str | Sequence[str], names: Mapping[str, str]) -> bool:
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first in names or second in names or first + second in names


def _unmarked(text: str) -> str:
    """A mark goes after the first letter: inside a control token, but after one that is a single letter."""
    return f"(?!{MARK})" if len(text) == 1 else ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
