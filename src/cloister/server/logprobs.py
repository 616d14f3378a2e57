"""Log-probabilities in the two formats of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from cloister.server.answers import ChatLogprobs, CompletionLogprobs, TokenChoice, TokenPosition
from cloister.server.generation import Echo
from cloister.types.request import TokenLogprobs

LOWEST_LOGPROB: Final = -9999.0
"""What stands for minus infinity, which JSON does not have; the OpenAI API writes the same figure."""


def chat_logprobs(positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Returns the format of /v1/chat/completions. A token that is no whole character shows U+FFFD beside its bytes."""
    return ChatLogprobs([_chat_position(position) for position in positions])


def _chat_position(position: TokenLogprobs) -> TokenPosition:
    top = [
        TokenChoice(text.decode(errors="replace"), _finite(logprob), list(text))
        for (_, logprob), text in zip(position.top, position.top_texts, strict=True)
    ]
    text = position.text
    return TokenPosition(text.decode(errors="replace"), _finite(position.logprob), list(text), top)


class LegacyLogprobs:
    """The format of /v1/completions for one choice, chunk after chunk, so that offsets run on.

    Args:
        echo: the prompt, if the choice's text begins with it.
    """

    def __init__(self, echo: Echo | None = None) -> None:
        self._echo = echo
        self._offset = len(echo.text) if echo is not None else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_prompt(self, positions: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Returns the prompt's part; its first token has no log-probability."""
        assert self._echo is not None
        known = [position for position in positions if position is not None]
        offsets = _prompt_offsets(self._echo, known)
        first = self._echo.first_token
        head = CompletionLogprobs([_token_name(first)], [None], [None], offsets[:1])
        return joined(head, _legacy(known, offsets[1:]))

    def add(self, positions: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Returns the part of the next tokens of the answer."""
        return _legacy(positions, [self._advance(position.text) for position in positions])

    def _advance(self, text: bytes) -> int:
        here = self._offset
        self._offset += len(self._decoder.decode(text))
        return here


def _prompt_offsets(echo: Echo, positions: Sequence[TokenLogprobs]) -> list[int]:
    """Where the prompt's tokens begin in its text. One that the text does not show, such as BOS, has no width."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, here = [], 0
    for text in (echo.first_token, *(position.text for position in positions)):
        offsets.append(here)
        shown = decoder.decode(text)
        # Some tokenizers put a space before the first word; the text that the client sent has none.
        widths = (len(form) for form in (shown, shown.removeprefix(" ")) if echo.text.startswith(form, here))
        here += next(widths, 0)
    return offsets


def _legacy(positions: Sequence[TokenLogprobs], offsets: list[int]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_token_name(position.text) for position in positions],
        token_logprobs=[_finite(position.logprob) for position in positions],
        top_logprobs=[_top_by_name(position) for position in positions],
        text_offset=offsets,
    )


def joined(*parts: CompletionLogprobs) -> CompletionLogprobs:
    """Returns the parts of one choice as one."""
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def _top_by_name(position: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens and the chosen one, as the older API has it: up to one more than was asked for."""
    texts = zip(position.top, position.top_texts, strict=True)
    top = {_token_name(text): _finite(logprob) for (_, logprob), text in texts}
    top.setdefault(_token_name(position.text), _finite(position.logprob))
    return top


def _token_name(text: bytes) -> str:
    """A token's text; one that is no whole character is spelled byte by byte, so that no two tokens share a name."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
