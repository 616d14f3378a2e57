"""Answers as they are read: text, reasoning and calls, from what the engine gives, for every route of conversations."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from cloister.server.generation import GenerationJob, Numbered, Tally
from cloister.text.answer_parser import AnswerParser
from cloister.text.parts import CallEnded, Part, Text
from cloister.types.request import FinishReason, SequenceOutput

TOOL_CALLS: Final = "tool_calls"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one step added to one answer.

    Attributes:
        finish_reason: "stop", "length" or "tool_calls" at the answer's end.
    """

    parts: list[Part]
    output: SequenceOutput
    finish_reason: str | None

    @property
    def index(self) -> int:
        """Which of the request's answers."""
        return self.output.index

    @property
    def only_text(self) -> str | None:
        """The text of a step that added nothing else, as most do."""
        if self.finish_reason is not None or len(self.parts) != 1 or not isinstance(self.parts[0], Text):
            return None
        return self.parts[0].text


async def read_turns(job: GenerationJob, outputs: AsyncGenerator[Numbered, None], tally: Tally) -> AsyncGenerator[Turn, None]:
    """Yields what every step adds to a job of one conversation, and counts it."""
    readers: dict[int, _Reader] = {}
    async with aclosing(outputs):
        async for number, output in outputs:
            tally.add(number, output)
            reader = readers.get(output.index)
            if reader is None:
                reader = readers[output.index] = _Reader(job)
            yield reader.read(output, tally)


class _Reader:
    """Reads one answer."""

    def __init__(self, job: GenerationJob) -> None:
        self._parser = None if job.form is None else AnswerParser(job.form)
        self._has_called = False

    def read(self, output: SequenceOutput, tally: Tally) -> Turn:
        is_end = output.finish_reason is not None
        parts = self._parse(output.text, is_end)
        if self._parser is not None and self._parser.is_reasoning:
            tally.add_reasoning(len(output.token_ids))
        self._has_called = self._has_called or any(isinstance(part, CallEnded) for part in parts)
        return Turn(parts, output, self._finish(output.finish_reason))

    def _parse(self, text: str, is_end: bool) -> list[Part]:
        if self._parser is None:
            return [Text(text)] if text else []
        parts = self._parser.push(text) if text else []
        return parts + self._parser.flush() if is_end else parts

    def _finish(self, reason: FinishReason | None) -> str | None:
        if reason is None:
            return None
        return TOOL_CALLS if self._has_called and reason is FinishReason.STOP else reason.value


def make_call_id() -> str:
    """Returns an id for a call, with nothing in it."""
    return f"call_{secrets.token_hex(12)}"
