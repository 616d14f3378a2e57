"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from cloister.text.spelling import SpecialTokens, Spelling

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
