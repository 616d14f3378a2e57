"""gpt-oss: calls in the channels of harmony, OpenAI's format of answers (`text.harmony` reads the rest of it).

`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`; the recipient may also stand before the
channel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, choice_rule, literal, schema
from cloister.text.tools.reading import MalformedError, OutputBuffer, Reading

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, CALL, END, RETURN = "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"
_MAX_HEADER_CHARS: Final = 400
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


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
