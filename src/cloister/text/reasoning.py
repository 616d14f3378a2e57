"""Reasoning: what a model says to itself before it answers, between marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cloister.text.parts import Reasoning, Text
from cloister.text.tools.base import THREAT
from cloister.text.tools.reading import OutputBuffer, Reading
from cloister.types.registry import Registry


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands around the reasoning of a family of models.

    Attributes:
        begin, end: as the model writes them.
    """

    begin: str
    end: str

    def are_open(self, prompt: str) -> bool:
        """Whether a prompt, as its template rendered it, ends inside the reasoning."""
        return prompt.rstrip().endswith(self.begin)


REASONINGS: Final[Registry[Marks]] = Registry("reasoning parser")
REASONINGS.register("think", THREAT)(Marks("<think>", "</think>"))
REASONINGS.register("magistral", THREAT)(Marks("[THINK]", "[/THINK]"))


def detect_reasoning(template: str) -> str | None:
    """Returns the name of the marks that a chat template knows, or None."""
    for name in REASONINGS.names():
        marks = REASONINGS.get(name)
        if marks.begin in template or marks.end in template:
            return name
    return None


def read_reasoning(source: OutputBuffer, marks: Marks, *, is_open: bool) -> Reading[None]:
    """Reads the reasoning that an answer may begin with; the space around it and after it is left out.

    Args:
        is_open: the prompt has begun the reasoning already.
    """
    yield from source.skip_space()
    if not (yield from source.take(marks.begin)) and not is_open:
        return
    yield from source.skip_space()
    source.keep()
    yield from _as_reasoning(source.pass_text((marks.end,), drops_last_space=True))
    yield from source.skip_space()
    source.keep()


def _as_reasoning(passing: Reading[str | None]) -> Reading[None]:
    for part in passing:
        yield Reasoning(part.text) if isinstance(part, Text) else part
