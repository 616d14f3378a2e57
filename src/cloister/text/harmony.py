"""Answers in the channels of harmony, OpenAI's format for gpt-oss: messages one after the other, each with a header.

`<|channel|>analysis<|message|>` begins reasoning, `<|channel|>final<|message|>` and a commentary without a recipient begin
text, and a message with a recipient is a call (`text.tools.harmony`). `<|end|>` ends a message, `<|start|>assistant` begins the
next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cloister.text.parts import Reasoning, Text
from cloister.text.tools.base import CallReader, Tool
from cloister.text.tools.harmony import CALL, CHANNEL, END, RETURN, START, read_header, read_message_call, recipient_of
from cloister.text.tools.reading import MalformedError, OutputBuffer, Reading

ANALYSIS: Final = "analysis"
FINAL: Final = f"{CHANNEL}final<|message|>"
"""Begins an answer that has a form, which leaves no room for other channels."""
_MARKS: Final = (START, CHANNEL, END, CALL, RETURN)


def read_channels(source: OutputBuffer, tools: Mapping[str, Tool], *, is_open: bool) -> Reading[None]:
    """Reads an answer to its end: reasoning, text and calls.

    Args:
        tools: that may be called, by name.
        is_open: the prompt has begun the analysis already.
    """
    reader = CallReader(source, tools)
    yield from source.skip_space()
    if (yield from source.take("to=")):  # the recipient goes on from the prompt's `<|start|>assistant`
        is_analysis = yield from _read_message(reader, "to=")
    else:
        is_analysis = is_open
    while True:
        mark = yield from _pass_content(source, is_analysis=is_analysis)
        if mark is None:
            return
        if mark in (START, CHANNEL):
            is_analysis = yield from _read_message(reader, mark)
        else:
            source.keep()
            is_analysis = False


def _read_message(reader: CallReader, opening: str) -> Reading[bool]:
    """Reads a header and, if the message is a call, the call; returns whether reasoning follows."""
    try:
        header = opening + (yield from read_header(reader.source))
        name = recipient_of(header)
        if name is not None and (name in reader.tools or not _is_analysis(header)):
            yield from read_message_call(reader, name)
            reader.source.keep()
            return False
    except MalformedError:
        if (part := reader.give_up()) is not None:
            yield part
        return False
    reader.source.keep()
    return _is_analysis(header)


def _is_analysis(header: str) -> bool:
    return header.rpartition(CHANNEL)[2].strip().startswith(ANALYSIS)


def _pass_content(source: OutputBuffer, *, is_analysis: bool) -> Reading[str | None]:
    """Passes a message's content on; returns the mark that ends it, or None at the end of the answer."""
    passing = source.pass_text(_MARKS, drops_last_space=is_analysis)
    while True:
        try:
            part = next(passing)
        except StopIteration as end:
            mark: str | None = end.value
            return mark
        yield Reasoning(part.text) if is_analysis and isinstance(part, Text) else part
