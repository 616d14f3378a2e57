"""Training text for heads and drafts: passages, and answers that the model gave itself (self-distillation).

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

from cloister.api import LLM
from cloister.types.errors import ConfigError
from cloister.types.request import SamplingParams
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


# What the model says itself: answers to questions, and what it goes on with behind a text (self-distillation).
#
# A drafter drafts what the model writes, not what people wrote; so it learns best from that.


_AT_ONCE: Final = 256
"""Prompts that go to the engine together: as many as keep it full, few enough that progress shows."""


def answer(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    seed: int,
    advance: Callable[[int], object],
) -> list[Passage]:
    """Returns each prompt with what the model says to it.

    Args:
        temperature: 0 takes the likeliest tokens; else answers are drawn, repeatable by the seed.
        advance: told how many more prompts are answered.

    Raises:
        CloisterError: a prompt cannot be answered.
    """
    found: list[Passage] = []
    for start in range(0, len(prompts), _AT_ONCE):
        some = prompts[start : start + _AT_ONCE]
        seeds = range(seed + start, seed + start + len(some))
        sampling = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=one) for one in seeds]
        for completion in llm.generate([list(prompt) for prompt in some], sampling):
            prompt, said = completion.prompt_token_ids, completion.outputs[0].token_ids
            if said and said[-1] in llm.model.eos_token_ids:
                said = said[:-1]  # nothing follows the end, so there is nothing to learn at its place
            found.append(Passage.own(len(prompt) - 1, [*prompt, *said]))
        advance(len(some))
    return found


def render_questions(llm: LLM, questions: Sequence[str]) -> list[list[int]]:
    """Returns the prompt of each question, as the model's chat template writes it."""
    return [llm.render([{"role": "user", "content": question}]) for question in questions]


def cut_beginnings(passages: Sequence[Passage], count: int, seed: int) -> list[list[int]]:
    """Returns the beginnings of some passages of text, of an eighth to a half of their length, to go on from."""
    rng = Random(seed)
    chosen = [passage for passage in passages if len(passage.token_ids) >= 16]
    rng.shuffle(chosen)
    beginnings = []
    for passage in chosen[:count]:
        length = len(passage.token_ids)
        beginnings.append(list(passage.token_ids[: rng.randint(length // 8, length // 2)]))
    return beginnings
