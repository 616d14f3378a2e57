"""Streamed text: incremental detokenization that never emits half a character, and stop strings."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from cloister.text.spelling import SpecialTokens, Spelling
from cloister.types.errors import InvalidRequestError

_TAIL_TOKENS = 8


class TokenBytes(Protocol):
    """The part of a tokenizer that a detokenizer needs."""

    special: SpecialTokens
    spelling: Spelling

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Text of one sequence. What all pushes and the flush return, joined, is what `Tokenizer.decode` returns for all ids.

    Bytes that begin a character wait for the rest of it; bytes that cannot become one are U+FFFD, one per maximal
    subpart (Unicode 16, section 3.9, table 3-8). O(1) per token.

    Args:
        skip_special_tokens: control tokens have no text, except those in `shown`.
        prompt_ids: what the text goes on from. A character that the prompt's last tokens left open is finished, and a
            leading space is text then, while at the start of a text SentencePiece put it there itself.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special.control_ids if skip_special_tokens else frozenset()
        if shown:
            self._skipped -= frozenset(shown)
        self._open = b""
        self._num_to_strip = tokenizer.spelling.num_leading_spaces
        if any(token_id not in self._skipped and tokenizer.token_bytes(token_id) for token_id in prompt_ids):
            self._num_to_strip = 0
        self.push(prompt_ids[-_TAIL_TOKENS:])

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes tokens in and returns the text that is certain now."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = self._open + b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
        text, num_read = utf_8_decode(data, "replace", False)
        self._open = data[num_read:]
        return self._stripped(text) if self._num_to_strip else text

    def push_token(self, token_id: int) -> str:
        """As `push`, for one token."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._open or self._num_to_strip or not data.isascii():
            return self.push((token_id,))
        return data.decode("ascii")

    def flush(self, *, is_cut: bool = False) -> str:
        """Returns what is left when no more tokens come: U+FFFD for a character that was left open, else nothing.

        Args:
            is_cut: more tokens would have come. The bytes left open are the start of a character then, and have no text.
        """
        rest, self._open = self._open, b""
        if is_cut:
            return ""
        return self._stripped(utf_8_decode(rest, "replace", True)[0])

    def _stripped(self, text: str) -> str:
        while text and self._num_to_strip:
            if not text.startswith(" "):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


class StopStrings:
    """Passes text on until a stop string is complete. How the text is cut into pieces makes no difference.

    The stop string that is complete first wins; of two complete at the same character, the longer.

    Args:
        stops: none of them empty.
        include_stop: the stop string itself is passed on too.

    Raises:
        InvalidRequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise InvalidRequestError("a stop string must not be empty; leave it out", param="stop")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._beginnings = [_Beginning(stop) for stop in self._stops]
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes text in; returns what is certain to be part of the answer, and the stop string if one is complete.

        After a match nothing is passed on any more.
        """
        if self._matched is not None:
            return "", self._matched
        held = self._held + text
        found = [(held.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in held]
        if found:
            end, _, self._matched = min(found)
            self._held = ""
            return held[: end if self._include_stop else end - len(self._matched)], self._matched
        certain = len(held) - max((beginning.read(text) for beginning in self._beginnings), default=0)
        self._held = held[certain:]
        return held[:certain], None

    def flush(self) -> str:
        """Returns the text held back, when no more comes."""
        held, self._held = self._held, ""
        return held


class _Beginning:
    """How much of a stop string the text read so far ends in (Knuth, Morris and Pratt 1977, section 2).

    Looking at every length for every piece would let long stop strings and an answer that almost is one hold a step up.
    """

    __slots__ = ("_borders", "_size", "_stop")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._size = 0
        self._borders = [0, 0]  # by size of a beginning, the next smaller one that it ends in; as far as it was needed

    def read(self, text: str) -> int:
        """Reads text in which the stop string is not complete; returns the size."""
        stop, borders, size = self._stop, self._borders, self._size
        for letter in text:
            size = self._grow(size, letter)
            if size == len(borders):
                borders.append(self._grow(borders[-1], stop[size - 1]))
        self._size = size
        return size

    def _grow(self, size: int, letter: str) -> int:
        while size and self._stop[size] != letter:
            size = self._borders[size]
        return size + (self._stop[size] == letter)
