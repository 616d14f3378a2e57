"""What heads and drafts learn from: passages of text, and answers that the model gave itself.

A passage is held out by the hash of its tokens, so neither order nor seed decides which.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from cloister.types.errors import ConfigError
from cloister.types.text_files import read_text_file

HELD_OUT_ONE_IN: Final = 16
FEWEST_TOKENS: Final = 2000
"""Of all passages together; less teaches nothing."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens in a row, from position 0 on.

    Attributes:
        start: the first place to learn from: the last token of the prompt, where the model wrote what follows; else 0.
        is_own: the model wrote what follows `start` itself.
    """

    token_ids: array[int]
    start: int = 0
    is_own: bool = False

    @classmethod
    def own(cls, start: int, token_ids: Sequence[int]) -> Passage:
        """A passage that the model wrote from behind `start` on."""
        return cls(array("i", token_ids), start, is_own=True)

    @property
    def is_held_out(self) -> bool:
        """Whether it is kept from training, to measure on."""
        digest = hashlib.sha256(self.token_ids[: self.start + 1 if self.is_own else None].tobytes()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0

    def __repr__(self) -> str:
        """Says nothing of content."""
        return f"Passage(num_tokens={len(self.token_ids)})"


def read_files(paths: Sequence[Path]) -> list[str]:
    """Returns the texts of files, and of every `.txt` and `.md` file below folders, by name.

    Raises:
        ConfigError: there is no such file, one is not UTF-8, or a folder has none.
    """
    texts = []
    for path in paths:
        files = sorted(file for kind in ("*.txt", "*.md") for file in path.rglob(kind)) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"the folder {path} has no .txt or .md file", param="text")
        for file in files:
            texts.append(read_text_file(file, param="text"))
    return texts


def cut_passages(
    texts: Sequence[str], encode: Callable[[str], list[int]], length: int, num_tokens: int, seed: int
) -> list[Passage]:
    """Returns passages of at most `length` tokens, of texts that are drawn until there are `num_tokens` tokens together."""
    rng = Random(seed)
    order = list(range(len(texts)))
    rng.shuffle(order)
    found: list[Passage] = []
    for index in order:
        if num_tokens <= 0:
            break
        ids = array("i", encode(texts[index])[:num_tokens])
        num_tokens -= len(ids)
        found += [Passage(ids[start : start + length]) for start in range(0, len(ids), length)]
    return found


def check_size(passages: Sequence[Passage], num_heads: int) -> None:
    """Raises ConfigError if there is too little to learn from, or nothing to measure on."""
    total = sum(len(passage.token_ids) for passage in passages)
    if total < FEWEST_TOKENS:
        raise ConfigError(f"the text has {total} tokens in all; give {FEWEST_TOKENS} at least", param="text")
    for held_out in (True, False):
        if not any(p.is_held_out is held_out and len(p.token_ids) - p.start > num_heads for p in passages):
            raise ConfigError(
                f"of {len(passages)} passages none is {'held out to measure on' if held_out else 'left to learn from'}; one in "
                f"{HELD_OUT_ONE_IN} is held out, chosen by a hash of its tokens: give more text",
                param="text",
            )
