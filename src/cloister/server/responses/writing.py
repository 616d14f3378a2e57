"""Converts the parts of an answer to items of a response, and to streamed events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from cloister.server.answers import Usage, chat_logprobs
from cloister.server.choices import Turn, make_call_id
from cloister.server.jobs import GenerationJob
from cloister.server.responses.schemas import ResponsesBody
from cloister.server.stream import named_events
from cloister.text.parts import Arguments, CallBegun, CallBroken, CallEnded, Part, Reasoning, Text
from cloister.types.errors import CloisterError

Event = dict[str, Any]


class ResponseWriter:
    """Writes one response.

    Args:
        job, body: the parsed request.
        keeps_broken: invalid calls stay among the items, as incomplete: a stream has already sent them.
    """

    def __init__(self, job: GenerationJob, body: ResponsesBody, *, keeps_broken: bool) -> None:
        self._job = job
        self._body = body
        self._keeps_broken = keeps_broken
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._pieces: list[str] = []
        self._held: list[msgspec.Raw] = []
        self._number = 0
        self._template: _DeltaTemplate | None = None

    def begin(self) -> Iterator[Event]:
        """Yields the events before the first item."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self.response("in_progress", None))

    def write(self, turn: Turn) -> bytes:
        """Returns the events of one step. Most only add text to the open message."""
        template = self._template if self._is_open and self._item["type"] == "message" else None
        is_plain = template is not None and turn.output.logprobs is None and not self._held
        if template is not None and is_plain and (text := turn.only_text) is not None:
            self._pieces.append(text)
            self._number += 1
            return template.fill(self._number - 1, text)
        return named_events(self.add(turn))

    def add(self, turn: Turn) -> Iterator[Event]:
        """Yields the events of one step's delta."""
        if turn.output.logprobs:
            self._held += chat_logprobs(turn.output.logprobs).content
        for part in turn.parts:
            yield from self._add(part)

    def end(self, finish_reason: str | None, usage: Usage) -> Iterator[Event]:
        """Yields the end of the last item and of the response."""
        is_cut = finish_reason == "length"
        if not self._items:  # clients expect a message, even an empty one
            yield from self._open_message()
        yield from self._close("incomplete" if is_cut else "completed")
        status = "incomplete" if is_cut else "completed"
        yield self._event(f"response.{status}", response=self.response(status, usage))

    def fail(self, error: CloisterError) -> bytes:
        """Returns the event that ends a failed stream."""
        event = self._event("error", code=error.code, message=error.message, param=error.param)
        return named_events([event])

    def response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        """Returns the current response."""
        body, job = self._body, self._job
        sampling = job.requests[0].sampling
        return {
            "id": job.job_id,
            "object": "response",
            "created_at": job.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": job.model_name,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "service_tier": None,
            "store": bool(body.store),
            "temperature": sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._choice(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
        }

    def _format(self) -> dict[str, Any]:
        form = self._body.text.format if self._body.text is not None else None
        return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)

    def _choice(self) -> Any:
        choice = self._body.tool_choice
        if choice is None:
            return "auto"
        return choice.type if choice.type in ("none", "auto", "required") else choice.model_dump()

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case Text(text):
                yield from self._add_text(text)
            case Reasoning(text):
                thought = {"id": _make_id("rs"), "summary": [], "content": [], "status": "in_progress"}
                yield from self._open("reasoning", thought)
                yield from self._delta("response.reasoning_text.delta", text, content_index=0)
            case CallBegun(_, name):
                call = {"id": _make_id("fc"), "call_id": make_call_id(), "name": name, "arguments": "", "status": "in_progress"}
                yield from self._open("function_call", call, always=True)
            case Arguments(_, text):
                yield from self._delta("response.function_call_arguments.delta", text)
            case CallEnded():
                yield from self._close("completed")
            case CallBroken(_, raw):
                yield from self._close("incomplete")
                if not self._keeps_broken:
                    self._items.pop()
                yield from self._add_text(raw)

    def _add_text(self, text: str) -> Iterator[Event]:
        yield from self._open_message()
        logprobs, self._held = self._held, []
        self._item["content"][0]["logprobs"] += logprobs
        yield from self._delta("response.output_text.delta", text, content_index=0, logprobs=logprobs)

    def _open_message(self) -> Iterator[Event]:
        message = {"id": _make_id("msg"), "role": "assistant", "content": [], "status": "in_progress"}
        yield from self._open("message", message)

    @property
    def _item(self) -> dict[str, Any]:
        """The open item."""
        return self._items[-1]

    def _open(self, kind: str, fields: dict[str, Any], *, always: bool = False) -> Iterator[Event]:
        """Opens an item, unless one of its type is open and can continue."""
        if self._is_open and self._item["type"] == kind and not always:
            return
        yield from self._close("completed")
        self._is_open, self._pieces = True, []
        self._items.append({"type": kind, **fields})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(self._item))
        if kind == "function_call":
            self._held = []
            return
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._here("response.content_part.added", content_index=0, part=part)
        self._item["content"] = [part]
        if kind == "message":
            delta = self._here("response.output_text.delta", delta="", content_index=0, logprobs=[])
            self._template = _DeltaTemplate(delta)
            self._number -= 1  # it was not sent in an event yet

    def _delta(self, name: str, text: str, **more: Any) -> Iterator[Event]:
        self._pieces.append(text)
        yield self._here(name, delta=text, **more)

    def _close(self, status: str) -> Iterator[Event]:
        """Ends the open item, if any."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self._item, "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._here("response.function_call_arguments.done", arguments=text)
        else:
            part = item["content"][0]
            part["text"] = text
            done = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            more = {"logprobs": part["logprobs"]} if done == "output_text" else {}
            yield self._here(f"response.{done}.done", content_index=0, text=text, **more)
            yield self._here("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _here(self, name: str, **fields: Any) -> Event:
        return self._event(name, item_id=self._item["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, name: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": name, "sequence_number": self._number - 1, **fields}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _make_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


class _DeltaTemplate:
    """Template of a text delta event: everything except its number and text is encoded once.

    Args:
        event: an event with any number.
    """

    __slots__ = ("_head", "_middle", "_tail")

    def __init__(self, event: Event) -> None:
        number, text = secrets.token_hex(16), secrets.token_hex(16)
        head, rest = named_events([event | {"sequence_number": number, "delta": text}]).split(b'"%s"' % number.encode())
        self._head = head
        self._middle, self._tail = rest.split(b'"%s"' % text.encode())

    def fill(self, number: int, text: str) -> bytes:
        """Returns the event with its number."""
        return b"".join((self._head, b"%d" % number, self._middle, msgspec.json.encode(text), self._tail))
