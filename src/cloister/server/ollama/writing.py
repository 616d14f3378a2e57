"""Writes answers as Ollama's NDJSON stream, whose last line is `done`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from cloister.server.answers import Usage, chat_logprobs
from cloister.server.calls import HttpCall
from cloister.server.choices import TOOL_CALLS, Turn, make_call_id
from cloister.server.jobs import GenerationJob, read_timings
from cloister.text.parts import Arguments, CallBegun, CallBroken, CallEnded, Reasoning, Text
from cloister.types.errors import CloisterError

NDJSON: Final = "application/x-ndjson"
_NS: Final = 1_000_000_000

Count = int | UnsetType


class OllamaError(msgspec.Struct, frozen=True):
    """Reply of a request that cannot be answered."""

    error: str


class CalledTool(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]
    index: int


class OllamaToolCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledTool


class OllamaAnswer(msgspec.Struct, frozen=True):
    """The assistant's message, or a piece of it."""

    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    created_at: datetime
    done: bool
    logprobs: list[msgspec.Raw] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: Count = UNSET
    load_duration: Count = UNSET
    prompt_eval_count: Count = UNSET
    prompt_eval_duration: Count = UNSET
    eval_count: Count = UNSET
    eval_duration: Count = UNSET


class OllamaChatLine(_Line, frozen=True, kw_only=True):
    """Reply of /api/chat, or a line of its stream. Durations are in nanoseconds, on the last line."""

    message: OllamaAnswer


class OllamaGenerateLine(_Line, frozen=True, kw_only=True):
    """Reply of /api/generate, or a line of its stream. Durations are in nanoseconds, on the last line."""

    response: str
    thinking: str | UnsetType = UNSET


@dataclass(slots=True)
class Gain:
    """The delta of an answer: of one step, or of all."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[OllamaToolCall] = field(default_factory=list)
    logprobs: list[msgspec.Raw] | None = None

    def __bool__(self) -> bool:
        return bool(self.texts or self.thoughts or self.calls or self.logprobs)

    def add(self, other: Gain) -> None:
        """Appends a later delta."""
        self.texts += other.texts
        self.thoughts += other.thoughts
        self.calls += other.calls
        if other.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += other.logprobs


Shape = Callable[[Gain], dict[str, Any]]
"""Returns the answer fields of a line."""


def shape_chat(gain: Gain) -> dict[str, Any]:
    """Returns the fields of a line of /api/chat."""
    answer = OllamaAnswer("".join(gain.texts), thinking="".join(gain.thoughts) or UNSET, tool_calls=gain.calls or UNSET)
    return {"message": answer}


def shape_generate(gain: Gain) -> dict[str, Any]:
    """Returns the fields of a line of /api/generate."""
    return {"response": "".join(gain.texts), "thinking": "".join(gain.thoughts) or UNSET}


class ToolCallCollector:
    """Accumulates the calls of an answer: a line has complete ones only."""

    def __init__(self) -> None:
        self._name = ""
        self._pieces: list[str] = []
        self._num_calls = 0

    def read(self, turn: Turn) -> Gain:
        """Returns the delta of one step."""
        gain = Gain()
        if turn.output.logprobs is not None:
            gain.logprobs = chat_logprobs(turn.output.logprobs).content
        for part in turn.parts:
            match part:
                case Text(text) | CallBroken(_, text):
                    gain.texts.append(text)
                case Reasoning(text):
                    gain.thoughts.append(text)
                case CallBegun(_, name):
                    self._name, self._pieces = name, []
                case Arguments(_, text):
                    self._pieces.append(text)
                case CallEnded():
                    called = CalledTool(self._name, json.loads("".join(self._pieces)), self._num_calls)
                    gain.calls.append(OllamaToolCall(make_call_id(), called))
                    self._num_calls += 1
        return gain


@dataclass(frozen=True, slots=True)
class LineWriter:
    """Writes the lines of one reply.

    Attributes:
        kind: type of a line.
        shape: creates its fields from a delta.
        call: the HTTP request, for its times; None if it is not tracked.
    """

    kind: Callable[..., OllamaChatLine | OllamaGenerateLine]
    shape: Shape
    model_name: str
    call: HttpCall | None

    def more(self, gain: Gain) -> OllamaChatLine | OllamaGenerateLine:
        """Returns a line of a stream."""
        return self._line(gain, done=False)

    def last(self, gain: Gain, finish_reason: str, usage: Usage, job: GenerationJob) -> OllamaChatLine | OllamaGenerateLine:
        """Returns the last line of a stream, or the whole reply."""
        return self._line(
            gain,
            done=True,
            done_reason="stop" if finish_reason == TOOL_CALLS else finish_reason,
            prompt_eval_count=usage.prompt_tokens,
            eval_count=usage.completion_tokens,
            **durations(self.call, job),
        )

    def present(self) -> OllamaChatLine | OllamaGenerateLine:
        """Returns the reply to a request that only checks that the model is available."""
        return self._line(Gain(), done=True, done_reason="load")

    def _line(self, gain: Gain, **fields: Any) -> OllamaChatLine | OllamaGenerateLine:
        logprobs = UNSET if gain.logprobs is None else gain.logprobs
        return self.kind(model=self.model_name, created_at=datetime.now(UTC), logprobs=logprobs, **self.shape(gain), **fields)


def durations(call: HttpCall | None, job: GenerationJob) -> dict[str, int]:
    """Returns the durations of a job in nanoseconds, if known."""
    times = read_timings(call, job)
    named = {
        "total_duration": times.total_s,
        "load_duration": times.load_s,
        "prompt_eval_duration": times.prompt_s,
        "eval_duration": times.answer_s,
    }
    return {name: round(time_s * _NS) for name, time_s in named.items() if time_s is not None}


def lines(objects: Iterable[Any]) -> bytes:
    """Returns objects as JSON, one a line."""
    return b"".join(msgspec.json.encode(item) + b"\n" for item in objects)


def write_failure(error: CloisterError) -> bytes:
    """Returns the line that ends a failed stream."""
    return lines([OllamaError(error.message)])


def error_object(_status: int, message: str) -> OllamaError:
    """Returns the body of an error reply."""
    return OllamaError(message)
