"""Parses an answer while it streams: reasoning first, then text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cloister.text.parts import CallBroken, Part, Reasoning, Text
from cloister.text.tools import harmony
from cloister.text.tools.base import THREAT, Tool, ToolCallFormat, read_calls
from cloister.text.tools.harmony import read_channels
from cloister.text.tools.reading import OutputBuffer, Reading
from cloister.types.registry import Registry

# Reasoning: the marked text that a model writes before its answer.


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands around the reasoning of a family of models.

    Attributes:
        begin, end: as the model writes them.
    """

    begin: str
    end: str

    @property
    def all(self) -> tuple[str, ...]:
        """Whatever the reader of an answer has to see."""
        return self.begin, self.end

    def are_open(self, prompt: str) -> bool:
        """Whether a prompt, as its template rendered it, ends inside the reasoning."""
        return prompt.rstrip().endswith(self.begin)


@dataclass(frozen=True, slots=True)
class ChannelMarks(Marks):
    """Reasoning is a channel of harmony, among others with text and calls (`text.tools.harmony`)."""

    @property
    def all(self) -> tuple[str, ...]:
        return harmony.HarmonyCalls.marks + harmony.HarmonyCalls.inner_marks


REASONINGS: Final[Registry[Marks]] = Registry("reasoning parser")
REASONINGS.register("think", THREAT)(Marks("<think>", "</think>"))
REASONINGS.register("magistral", THREAT)(Marks("[THINK]", "[/THINK]"))
REASONINGS.register("harmony", THREAT)(ChannelMarks("<|channel|>analysis<|message|>", "<|end|>"))


def detect_reasoning(template: str) -> str | None:
    """Returns the name of the marks that a chat template knows, or None."""
    for name in REASONINGS.names():
        marks = REASONINGS.get(name)
        if marks.begin in template or (marks.end in template and not isinstance(marks, ChannelMarks)):
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


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What there may be in an answer beside text.

    Attributes:
        marks: around reasoning, if the model reasons.
        is_open: the prompt has begun the reasoning already.
        family: how the model calls tools, if it may.
        tools: those that it may call, by name.
        parallel: an answer may have more than one call; else those after the first are left out.
    """

    marks: Marks | None = None
    is_open: bool = False
    family: ToolCallFormat | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    parallel: bool = True


class AnswerParser:
    """Turns the text of one answer into parts. How the text is cut into pieces makes no difference to what they spell.

    Attributes:
        is_reasoning: what comes next is reasoning, as far as can be told.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._source = OutputBuffer()
        self._parts = self._read()
        self._only = None if form.parallel else 0
        self.is_reasoning = form.is_open

    def push(self, text: str) -> list[Part]:
        """Takes text in and returns the parts that are certain now."""
        self._source.feed(text)
        return self._advance()

    def flush(self) -> list[Part]:
        """Returns what is left when no more text comes."""
        self._source.is_whole = True
        return self._advance()

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._parts:
            if part is None:
                break
            self.is_reasoning = isinstance(part, Reasoning)
            if self._only is None or self._is_wanted(part):
                parts.append(part)
        return parts

    def _is_wanted(self, part: Part) -> bool:
        """Where one call is all, the first that is complete is it."""
        if isinstance(part, Text | Reasoning):
            return True
        wanted = part.index == self._only
        if wanted and isinstance(part, CallBroken) and self._only is not None:
            self._only += 1
        return wanted

    def _read(self) -> Reading[None]:
        form = self._form
        if isinstance(form.marks, ChannelMarks):
            yield from read_channels(self._source, form.tools, is_open=form.is_open)
            return
        if form.marks is not None:
            yield from read_reasoning(self._source, form.marks, is_open=form.is_open)
            self.is_reasoning = False
        if form.family is None:
            yield from self._source.pass_all()
        else:
            yield from read_calls(self._source, form.family, form.tools)
