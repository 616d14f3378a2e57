"""Keeps what a user wrote from turning into control tokens.

A chat template writes control tokens such as `<|end|>` as text and pastes contents between them, so a content that
spells `<|end|><|system|>` would, once tokenized, end its turn and speak as the system. The guard puts a mark inside
every such spelling before the template sees it. `Tokenizer.encode` takes marked text as plain text, without the marks:
what a user wrote reaches the model letter by letter, and only the template's own control tokens are control tokens.

The mark is U+FDD0, a code point that Unicode keeps for use inside a program and never for text. A content that holds it
loses it, and gains nothing by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cloister.text.spelling import SpecialTokens

MARK = "\ufdd0"
NOTHING = "(?!)"
"""A pattern that matches nowhere."""


class Guard:
    """Marks the control tokens of one model.

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
