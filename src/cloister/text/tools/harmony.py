"""gpt-oss: harmony, OpenAI's format of answers in channels, and the calls in it.

`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`; the recipient may also stand before the
channel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from cloister.text.parts import Reasoning, Text
from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, choice_rule, literal, schema
from cloister.text.tools.reading import MalformedError, OutputBuffer, Reading

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, CALL, END, RETURN = "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"
_MAX_HEADER_CHARS: Final = 400
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
ANALYSIS: Final = "analysis"
FINAL: Final = f"{CHANNEL}final<|message|>"
"""Begins an answer that has a form, which leaves no room for other channels."""
_MARKS: Final = (START, CHANNEL, END, CALL, RETURN)


def read_header(source: OutputBuffer) -> Reading[str]:
    """Reads the header of a message, up to where its content begins, and returns it.

    Raises:
        MalformedError: there is none, or it is too long.
    """
    header = ""
    while not (yield from source.take(MESSAGE)):
        letter = yield from source.peek()
        if not letter or len(header) >= _MAX_HEADER_CHARS:
            raise MalformedError
        yield from source.take(letter)
        header += letter
    return header


def recipient_of(header: str) -> str | None:
    """Returns the function that a message is for; None for one to the user, or to nobody."""
    found = _RECIPIENT.search(header)
    return None if found is None else found[1]


def read_message_call(reader: CallReader, name: str) -> Reading[None]:
    """Reads the content of a message to a function, and what ends it.

    Raises:
        MalformedError: it is no call of a tool.
    """
    yield reader.begin(name)
    yield from reader.source.skip_space()
    yield from reader.read_arguments()
    yield from reader.source.skip_space()
    if not (yield from reader.source.take(CALL)):
        yield from reader.source.take(END)


class HarmonyCalls:
    """A message to a function for each call."""

    marks = (CHANNEL,)
    inner_marks = (START, MESSAGE, CONSTRAIN, CALL, END, RETURN)
    is_bare = False
    example = f"{CHANNEL}commentary to=functions.name {CONSTRAIN}json{MESSAGE}{{...}}{CALL}"

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        name = recipient_of((yield from read_header(reader.source)))
        if name is None:
            raise MalformedError
        yield from read_message_call(reader, name)
        reader.source.keep()
        yield from reader.source.take(f"{START}assistant")

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        # one call, after which the model ends: `<|call|>` is one of the tokens that end its answer

        def write(tool: Tool) -> str:
            head = literal(f"commentary to=functions.{tool.name} ")
            return f'{spell(CHANNEL)} {head} {spell(CONSTRAIN)} "json" {spell(MESSAGE)} {schema(tool)}'

        return "\n".join(["start: call", choice_rule(tools, write)])


FAMILIES.register("harmony", THREAT)(HarmonyCalls())


# An answer is messages one after the other, each with a header. `<|channel|>analysis<|message|>` begins reasoning,
# `<|channel|>final<|message|>` and a commentary without a recipient begin text, and a message with a recipient is a call.
# `<|end|>` ends a message, `<|start|>assistant` begins the next.
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
