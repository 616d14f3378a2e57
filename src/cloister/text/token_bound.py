"""A lower bound on the tokens of a text: milliseconds for a text whose tokens take seconds.

The tokens of a text cut it into entries of the vocabulary. So none is longer than the longest entry, and there is a cut
between two bytes that stand side by side in no entry, such as the last letter of a word and the space behind it. This holds for
byte-level tokenizers and for those of SentencePiece with byte tokens. Others drop or fuse letters that they do not know, and
have no bound; byte-level ones may do so with single bytes, which then do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

from cloister.text.spelling import ByteLevelSpelling, SentencePieceSpelling, Spelling

NUM_SETTLED: Final = 2
"""Tokens of a text that the settings for BOS and EOS may take away: see `Tokenizer.encode`."""
WINDOW_BYTES: Final = 2**20
"""So much of a text is looked at in one go, for memory."""
_UNICODE_FORMS: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_KEEPING: Final = frozenset({"ByteLevel", "Digits", "UnicodeScripts"})
"""Pre-tokenizers that drop nothing."""
_BYTE_TOKENS: Final = tuple(form.format(byte).encode() for form in ("<0x{:02X}>", "<0x{:02x}>") for byte in range(256))
"""A text that is written like a token for a byte may become that token, and then its letters are side by side in one."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenBound:
    """The bound of one tokenizer.

    Attributes:
        longest_bytes: length of the longest entry.
        are_apart: [65536] bool: whether two bytes, as 256 times the first one plus the second, stand side by side in no entry.
        replacements: (character, character) that are one in the vocabulary.
        normalizes: the text is brought to one of Unicode's forms first, which leaves only ASCII as it is.
        unknown: [256] bool: bytes that the vocabulary lacks; None for none.
        stretching: added tokens that take the spaces beside them with them; a text that has one has no bound.
    """

    longest_bytes: int
    are_apart: npt.NDArray[np.bool_]
    replacements: tuple[tuple[str, str], ...] = ()
    normalizes: bool = False
    unknown: npt.NDArray[np.bool_] | None = None
    stretching: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, spelling: Spelling, entries: Iterable[bytes]) -> TokenBound | None:
        """Returns the bound of a tokenizer; None if its tokens may stand for more text than their entries are long.

        Args:
            entries: the bytes of each token, added ones too.
        """
        replacements = spelling.replacements if isinstance(spelling, SentencePieceSpelling) else ()
        if not all(len(written) == len(meant) == 1 for written, meant in replacements):
            return None
        steps, cuts = _steps(tokenizer.normalizer, "normalizers"), _steps(tokenizer.pre_tokenizer, "pretokenizers")
        normalizes = any(step["type"] in _UNICODE_FORMS for step in steps)
        is_kept = all(_keeps_text(step, replacements) for step in steps) and all(
            _keeps_words(cut, replacements) for cut in cuts
        )
        known = _find_known_bytes(tokenizer.model, spelling, cuts)
        if not is_kept or (normalizes and replacements) or known is None:
            return None
        unknown = None if known.all() else ~known
        added = tokenizer.get_added_tokens_decoder().values()
        stretching = [token for token in added if token.lstrip or token.rstrip]
        if steps and any(token.normalized for token in stretching):
            return None
        longest, are_apart = _read_entries((*entries, *_BYTE_TOKENS))
        return cls(longest, are_apart, replacements, normalizes, unknown, tuple(token.content for token in stretching))

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that no way to encode a text falls below; 0 for one that is not valid Unicode."""
        if any(token in text for token in self.stretching):
            return 0
        for written, meant in self.replacements:
            text = text.replace(written, meant)
        try:
            data = np.frombuffer(text.encode(), np.uint8)
        except UnicodeEncodeError:
            return 0
        stays = self._find_kept(data)
        num_bytes = data.size if stays is None else int(np.count_nonzero(stays))
        num_cuts = sum(self._count_cuts(data, stays, start) for start in range(0, data.size - 1, WINDOW_BYTES))
        least = max(num_cuts + 1, -(-num_bytes // self.longest_bytes))
        return max(0, least - NUM_SETTLED)

    def _find_kept(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_] | None:
        """Returns which bytes of a text are surely in its tokens, [num_bytes] bool; None for all."""
        stays = None
        if self.normalizes and data.size and data.max() >= 0x80:
            stays = data < 0x80
            stays[:-1] &= stays[1:]  # a letter may become one with the mark behind it
        if self.unknown is not None and (drops := self.unknown[data]).any():
            stays = ~drops if stays is None else stays & ~drops
        return stays

    def _count_cuts(self, data: npt.NDArray[np.uint8], stays: npt.NDArray[np.bool_] | None, start: int) -> int:
        window = data[start : start + WINDOW_BYTES + 1]
        apart = self.are_apart[window[:-1] * np.uint16(256) + window[1:]]
        if stays is not None:
            kept = stays[start : start + WINDOW_BYTES + 1]
            apart &= kept[:-1] & kept[1:]
        return int(np.count_nonzero(apart))


def _steps(component: Any, parts: str) -> list[Mapping[str, Any]]:
    """Returns what a normalizer or pre-tokenizer does, step by step, as in tokenizer.json."""

    def flatten(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [each for part in step[parts] for each in flatten(part)] if step["type"] == "Sequence" else [step]

    return [] if component is None else flatten(json.loads(component.__getstate__()))


def _keeps_text(step: Mapping[str, Any], replacements: Sequence[tuple[str, str]]) -> bool:
    """Whether a step of a normalizer changes only what is one in the vocabulary, or adds something."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and _fold(pattern, replacements) == _fold(step["content"], replacements)
    return step["type"] == "Prepend" or step["type"] in _UNICODE_FORMS


def _keeps_words(cut: Mapping[str, Any], replacements: Sequence[tuple[str, str]]) -> bool:
    """Whether a step of a pre-tokenizer drops nothing."""
    if cut["type"] in ("Split", "Punctuation"):
        return str(cut["behavior"]) != "Removed"
    if cut["type"] == "Metaspace":
        return _fold(cut["replacement"], replacements) == " "
    return cut["type"] in _KEEPING


def _fold(text: str, replacements: Sequence[tuple[str, str]]) -> str:
    for written, meant in replacements:
        text = text.replace(written, meant)
    return text


def _find_known_bytes(model: Any, spelling: Spelling, cuts: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.bool_] | None:
    """Returns which bytes of a text become part of entries of the vocabulary, and not unknown tokens or none, [256] bool; None
    where that does not depend on single bytes."""
    if getattr(model, "continuing_subword_prefix", None) or getattr(model, "end_of_word_suffix", None):
        return None
    known = np.zeros(256, np.bool_)
    if isinstance(spelling, ByteLevelSpelling):
        for letter, byte in spelling.alphabet.items():
            known[byte] = model.token_to_id(letter) is not None
        is_byte_level = isinstance(model, tokenizers.models.BPE) and any(cut["type"] == "ByteLevel" for cut in cuts)
        return known if is_byte_level else None
    falls_back = isinstance(spelling, SentencePieceSpelling) and getattr(model, "byte_fallback", False) is True
    has_all = all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return ~known if falls_back and has_all else None


def _read_entries(entries: Iterable[bytes]) -> tuple[int, npt.NDArray[np.bool_]]:
    """Returns the length of the longest entry, at least 1, and which bytes stand side by side in none."""
    parts = list(filter(None, entries))
    data = np.frombuffer(b"".join(parts), np.uint8)
    pairs = data[:-1] * np.uint16(256) + data[1:]
    ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
    is_inside = np.ones(max(0, data.size - 1), np.bool_)
    is_inside[ends[:-1] - 1] = False  # from the end of one entry to the start of the next
    are_apart = np.ones(2**16, np.bool_)
    are_apart[pairs[is_inside]] = False
    return max(map(len, parts), default=1), are_apart
