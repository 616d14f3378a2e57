"""Fill-in-the-middle prompts, for models trained on them (Bavarian et al. 2022, arXiv 2207.14255, section 3).

Each family has tokens of its own for what stands before, what stands after, and where the answer begins. A model without them
would take the same text for something to go on with, so it is asked for no such prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cloister.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """How a family writes a prompt that has a beginning and an end.

    Attributes:
        before, between, after: tokens ahead of the beginning, between it and the end, and behind that.
        is_suffix_first: the end comes first in the prompt.
        others: tokens that end an answer beside those.
    """

    before: str
    between: str
    after: str = ""
    is_suffix_first: bool = False
    others: tuple[str, ...] = ()


FAMILIES: Final[Mapping[str, InfillMarks]] = {
    "qwen": InfillMarks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        others=("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>"),
    ),  # CodeGemma writes it the same way, and ends with <|file_separator|>
    "starcoder": InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", others=("<fim_pad>", "<file_sep>")),
    "santacoder": InfillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", others=("<fim-pad>",)),
    "deepseek": InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "code_llama": InfillMarks("▁<PRE>", "▁<SUF>", "▁<MID>", others=("▁<EOT>",)),
    "codestral": InfillMarks("[SUFFIX]", "[PREFIX]", is_suffix_first=True),
}


@dataclass(frozen=True, slots=True)
class Infill:
    """How one model fills in the middle."""

    tokenizer: Tokenizer
    marks: InfillMarks

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """Returns it, or None for a model whose vocabulary has no such tokens."""
        for marks in FAMILIES.values():
            wanted = [mark for mark in (marks.before, marks.between, marks.after) if mark]
            if all(_control_id(tokenizer, mark) is not None for mark in wanted):
                return cls(tokenizer, marks)
        return None

    def encode(self, prefix: str, suffix: str) -> list[int]:
        """Returns the prompt whose answer stands between `prefix` and `suffix`. Neither can write a control token."""
        marks = self.marks
        first, second = (suffix, prefix) if marks.is_suffix_first else (prefix, suffix)
        bos = self.tokenizer.encode("", add_special_tokens=True)[:1]
        return [
            *(bos if bos == [self.tokenizer.bos_token_id] else []),
            *self._mark(marks.before),
            *self.tokenizer.encode(first, parse_special=False),
            *self._mark(marks.between),
            *self.tokenizer.encode(second, parse_special=False),
            *self._mark(marks.after),
        ]

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that an answer cannot go beyond."""
        marks = self.marks
        texts = (marks.before, marks.between, marks.after, *marks.others)
        return [found for text in texts if text and (found := _control_id(self.tokenizer, text)) is not None]

    def _mark(self, text: str) -> list[int]:
        found = _control_id(self.tokenizer, text) if text else None
        return [] if found is None else [found]


def _control_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Returns the id of an added token; a vocabulary entry that is only spelled so is none."""
    found = tokenizer.token_id(text)
    return found if found in tokenizer.special.added else None
