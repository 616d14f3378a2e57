"""Marked prompts: words in an order that nobody else writes, so that whoever finds them found this very prompt. Pure.

The words are single tokens of the model, so that a mark is known as text and as token ids alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.privacy.residue.needles import RUN, Needle, of_text, of_token_ids
from cloister.text import Tokenizer

NUM_WORDS: Final = 12
_FEWEST_WORDS: Final = 200
_LEAST_ID: Final = 300
_ACCENTED: Final = "ü"


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark.

    Attributes:
        owner: number of the request that carries it.
        text: begins with a space; one of its words stands between letters that JSON escapes.
        token_ids: of its words, for each a run of ids in a row: those before the accented letter and those after it.
    """

    owner: int
    words: tuple[str, ...]
    runs: tuple[tuple[int, ...], ...]

    @property
    def text(self) -> str:
        half = NUM_WORDS // 2
        return "".join(self.words[:half]) + f" {_ACCENTED}" + "".join(self.words[half:])

    def needles(self) -> Iterator[Needle]:
        """Yields what shows a third of the mark or more, in every encoding."""
        half = NUM_WORDS // 2
        for start in range(0, NUM_WORDS, RUN):
            part = self.words[start : start + RUN]
            if not start < half < start + RUN:
                yield from of_text("".join(part), self.owner)
        around = "".join(self.words[half - 2 : half]) + f" {_ACCENTED}" + "".join(self.words[half : half + 2])
        yield from of_text(around, self.owner)
        for run in self.runs:
            yield from of_token_ids(run, self.owner)


class MarkMaker:
    """Makes marks that one model's tokenizer reads word for word.

    Args:
        seed: makes the marks repeatable; None draws them.

    Raises:
        ValueError: the tokenizer has too few whole words.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int | None = None) -> None:
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._words = tuple(_whole_words(tokenizer))
        if len(self._words) < _FEWEST_WORDS:
            raise ValueError(f"the tokenizer has {len(self._words)} whole words; marks need {_FEWEST_WORDS}")

    def make(self, owner: int) -> Mark:
        """Returns a new mark."""
        chosen: Sequence[tuple[str, int]] = [self._random.choice(self._words) for _ in range(NUM_WORDS)]
        ids = tuple(token_id for _, token_id in chosen)
        half = NUM_WORDS // 2
        return Mark(owner, tuple(word for word, _ in chosen), (ids[:half], ids[half:]))


def _whole_words(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yields words with a space before them that are one token, alone and behind another word."""
    for token_id in range(_LEAST_ID, tokenizer.vocab_size):
        data = tokenizer.read_bytes(token_id)
        if not (data.startswith(b" ") and len(data) >= 5 and data[1:].isalpha() and data.isascii()):
            continue
        word = data.decode()
        if tokenizer.encode(word) == [token_id] and tokenizer.encode(word * 2) == [token_id] * 2:
            yield word, token_id
