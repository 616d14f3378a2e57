"""A streaming reader that waits for missing text, so that chunk boundaries make no difference.

A reader is a generator. It yields the parts that are certain, and None where it needs more text. So the code of a family
reads from front to back, and the same letters give the same parts however many of them come at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Final, TypeVar

from cloister.text.parts import Part, Text

T = TypeVar("T")
Reading = Generator[Part | None, None, T]

MAX_NAME_CHARS: Final = 256
"""Names and keys in a call are no longer; what is, is no call."""
MAX_SPACE_CHARS: Final = 64

_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_SPACE: Final = " \t\r\n"
_SYNTAX: Final = re.compile(r'["\\{}\[\]]')


class MalformedError(Exception):
    """What stands here is no call."""


class OutputBuffer:
    """The text of one answer, as far as it came.

    Attributes:
        is_whole: no more comes.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self._text = ""
        self._place = 0

    def feed(self, text: str) -> None:
        """Takes in more."""
        self._text += text

    def keep(self) -> None:
        """What was read so far is settled: it is not in `raw` any more."""
        self._text = self._text[self._place :]
        self._place = 0

    def raw(self) -> str:
        """Returns what was read since it was settled last, and settles it."""
        text = self._text[: self._place]
        self.keep()
        return text

    def peek(self) -> Reading[str]:
        """Returns the next letter without reading it; nothing at the end."""
        while self._place == len(self._text):
            if self.is_whole:
                return ""
            yield None
        return self._text[self._place]

    def take(self, literal: str) -> Reading[bool]:
        """Reads a literal if it comes next; returns whether it did."""
        while not self._text.startswith(literal, self._place):
            rest = self._text[self._place :]
            if self.is_whole or not literal.startswith(rest):
                return False
            yield None
        self._place += len(literal)
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Reads a literal.

        Raises:
            MalformedError: something else comes next.
        """
        if not (yield from self.take(literal)):
            raise MalformedError

    def skip_space(self) -> Reading[None]:
        while (letter := (yield from self.peek())) and letter in _SPACE:
            self._place += 1

    def take_until(self, literal: str) -> Reading[str]:
        """Reads up to a literal and the literal itself; returns what stood before it.

        Raises:
            MalformedError: it does not come.
        """
        looked = self._place
        while (found := self._text.find(literal, looked)) < 0:
            if self.is_whole:
                raise MalformedError
            looked = max(self._place, len(self._text) - len(literal) + 1)
            yield None
        text = self._text[self._place : found]
        self._place = found + len(literal)
        return text

    def pass_text(self, marks: Sequence[str], *, drops_last_space: bool) -> Reading[str | None]:
        """Passes text on up to the first of the marks; returns the one that was read, or None at the end.

        Space before a mark (up to 64 letters) is for nobody's eyes: it is not passed on, but `raw` has it.

        Args:
            drops_last_space: space at the very end is not passed on either.
        """
        marked = _marked(tuple(marks))
        while True:
            text = self._text
            found = marked.search(text)
            mark = found["mark"] if found is not None else None
            if mark is None and self.is_whole:
                end = _without_space(text) if drops_last_space else len(text)
            else:
                end = _without_space(text if found is None else text[: found.start()])
            if end:
                yield Text(text[:end])
            self._text, self._place = text[end:], 0
            if found is not None and mark is not None:
                self._place = found.end() - end
                return mark
            if self.is_whole:
                self._text = ""
                return None
            yield None

    def pass_all(self) -> Reading[None]:
        """Passes on whatever comes."""
        while True:
            if self._text:
                yield Text(self._text)
                self._text, self._place = "", 0
            if self.is_whole:
                return
            yield None

    def json_string(self) -> Reading[str]:
        """Reads a short JSON string.

        Raises:
            MalformedError: there is none.
        """
        while (match := _STRING.match(self._text, self._place)) is None:
            rest = self._text[self._place : self._place + MAX_NAME_CHARS]
            if self.is_whole or len(rest) == MAX_NAME_CHARS or (rest and rest[0] != '"'):
                raise MalformedError
            yield None
        try:
            text = json.loads(match[0])
        except ValueError:
            raise MalformedError from None
        assert isinstance(text, str)
        self._place = match.end()
        return text

    def json_object(self, make: Callable[[str], Part | None]) -> Reading[str]:
        """Reads a JSON object and returns it as it stands.

        Args:
            make: makes a part of every piece of it, as they come; or None, which passes nothing on.

        Raises:
            MalformedError: there is none, or it is not valid (RFC 8259).
        """
        if (yield from self.peek()) != "{":
            raise MalformedError
        pieces, scan = [], _ObjectScan()
        while not scan.is_complete:
            if not (yield from self.peek()):
                raise MalformedError
            end = scan.find_end(self._text, self._place)
            piece = self._text[self._place : end]
            self._place = end
            pieces.append(piece)
            if (part := make(piece)) is not None:
                yield part
        text = "".join(pieces)
        if not is_json_object(text):
            raise MalformedError
        return text


class _ObjectScan:
    """Finds where a JSON object ends by its brackets and quotes alone."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_complete = False

    def find_end(self, text: str, start: int) -> int:
        """Returns where the object ends in the text, or where the text does."""
        place = start
        if self._is_escaped and place < len(text):
            self._is_escaped = False
            place += 1
        while (match := _SYNTAX.search(text, place)) is not None:
            place = match.end()
            letter = match[0]
            if self._is_in_string:
                if letter == "\\":
                    self._is_escaped = place == len(text)
                    place += 1
                elif letter == '"':
                    self._is_in_string = False
            elif letter == '"':
                self._is_in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_complete = True
                    return place
        return len(text)


def is_json_object(text: str) -> bool:
    """Whether the text is one JSON object, without NaN and the infinities that Python would read."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(_: str) -> None:
    raise ValueError


@lru_cache
def _marked(marks: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of the first mark (group `mark`), or of an end of the text that may become one."""
    whole = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    starts = sorted({mark[:size] for mark in marks for size in range(1, len(mark))}, key=len, reverse=True)
    return re.compile(f"(?P<mark>{whole})|(?:{'|'.join(map(re.escape, starts))})\\Z")


def _without_space(text: str) -> int:
    """Length of a text without the space at its end, of which not too much is ever held back."""
    return max(len(text.rstrip(_SPACE)), len(text) - MAX_SPACE_CHARS)
