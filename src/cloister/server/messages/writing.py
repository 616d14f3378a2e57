"""From the parts of an answer to the blocks of a message, and to the events that tell how they come to be."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any, Final

from cloister.server.answers import Usage
from cloister.server.job import GenerationJob
from cloister.server.messages.errors import error_object
from cloister.server.stream import EventTemplate, named_events
from cloister.server.turns import Turn
from cloister.text.parts import Arguments, CallBegun, CallBroken, CallEnded, Part, Reasoning, Text
from cloister.types.errors import CloisterError

Event = dict[str, Any]

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS: Final = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageWriter:
    """Writes one message.

    A call is written when it is complete: who gathers its JSON piece by piece cannot take back one that breaks.
    """

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._pieces: list[str] = []
        self._name = ""
        self._arguments: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._template: EventTemplate | None = None

    def begin(self, usage: Usage) -> Iterator[Event]:
        """Yields the events before the first block."""
        yield {"type": "message_start", "message": self.message(usage)}
        yield {"type": "ping"}

    def write(self, turn: Turn) -> bytes:
        """Returns the events of one step. Most are nothing but more text of the block that is open."""
        template = self._template if self._is_open and self._blocks[-1]["type"] == "text" else None
        if template is not None and (text := turn.only_text) is not None:
            self._pieces.append(text)
            return template.fill(text)
        return named_events(self.add(turn))

    def add(self, turn: Turn) -> Iterator[Event]:
        """Yields what one step added."""
        for part in turn.parts:
            yield from self._add(part)
        if turn.finish_reason is not None:
            self._stop_reason = _STOP_REASONS[turn.finish_reason]
            if turn.finish_reason == "stop" and isinstance(turn.output.stop_reason, str):
                self._stop_reason, self._stop_sequence = "stop_sequence", turn.output.stop_reason

    def end(self, usage: Usage) -> Iterator[Event]:
        """Yields the end of the last block and of the message."""
        yield from self._close()
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def message(self, usage: Usage) -> dict[str, Any]:
        """Returns the message as it stands."""
        return {
            "id": self._job.job_id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model_name,
            "content": list(self._blocks),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": _usage(usage),
        }

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case Text(text) | CallBroken(_, text):
                yield from self._add_text({"type": "text", "text": ""}, text)
            case Reasoning(text):
                yield from self._add_text({"type": "thinking", "thinking": "", "signature": ""}, text)
            case CallBegun(_, name):
                self._name, self._arguments = name, []
            case Arguments(_, text):
                self._arguments.append(text)
            case CallEnded():
                yield from self._add_call("".join(self._arguments))

    def _add_text(self, block: dict[str, Any], text: str) -> Iterator[Event]:
        if not self._is_open or self._blocks[-1]["type"] != block["type"]:
            yield from self._open(block)
        kind, name = _DELTAS[block["type"]]
        self._pieces.append(text)
        yield self._delta({"type": kind, name: text})

    def _add_call(self, arguments: str) -> Iterator[Event]:
        call = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": self._name, "input": {}}
        yield from self._open(call)
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        self._blocks[-1]["input"] = json.loads(arguments)
        yield from self._close()

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._is_open, self._pieces = True, []
        self._blocks.append(block)
        if block["type"] == "text":
            self._template = EventTemplate(lambda text: self._delta({"type": "text_delta", "text": text}), named_events)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        """Ends the block that is open, if one is."""
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] in _DELTAS:
            block[_DELTAS[block["type"]][1]] = "".join(self._pieces)
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _usage(usage: Usage) -> dict[str, Any]:
    """Counts as this API has them: what was read from the cache is not among the input tokens."""
    num_cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def write_failure(error: CloisterError) -> bytes:
    """Returns the event that ends a stream that cannot go on."""
    return named_events([error_object(error.status, error.message)])
