"""Finds stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.types.errors import InvalidRequestError


class StopStrings:
    """Passes text on until a stop string is complete. How the text is cut into pieces makes no difference.

    The stop string that is complete first wins; of two complete at the same character, the longer.

    Args:
        stops: none of them empty.
        include_stop: the stop string itself is passed on too.

    Raises:
        InvalidRequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise InvalidRequestError("a stop string must not be empty; leave it out", param="stop")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._beginnings = [_Beginning(stop) for stop in self._stops]
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes text in; returns what is certain to be part of the answer, and the stop string if one is complete.

        After a match nothing is passed on any more.
        """
        if self._matched is not None:
            return "", self._matched
        held = self._held + text
        found = [(held.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in held]
        if found:
            end, _, self._matched = min(found)
            self._held = ""
            return held[: end if self._include_stop else end - len(self._matched)], self._matched
        certain = len(held) - max((beginning.read(text) for beginning in self._beginnings), default=0)
        self._held = held[certain:]
        return held[:certain], None

    def flush(self) -> str:
        """Returns the text held back, when no more comes."""
        held, self._held = self._held, ""
        return held


class _Beginning:
    """How much of a stop string the text read so far ends in (Knuth, Morris and Pratt 1977, section 2).

    Looking at every length for every piece would let long stop strings and an answer that almost is one hold a step up.
    """

    __slots__ = ("_borders", "_size", "_stop")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._size = 0
        self._borders = [0, 0]  # by size of a beginning, the next smaller one that it ends in; as far as it was needed

    def read(self, text: str) -> int:
        """Reads text in which the stop string is not complete; returns the size."""
        stop, borders, size = self._stop, self._borders, self._size
        for letter in text:
            size = self._grow(size, letter)
            if size == len(borders):
                borders.append(self._grow(borders[-1], stop[size - 1]))
        self._size = size
        return size

    def _grow(self, size: int, letter: str) -> int:
        while size and self._stop[size] != letter:
            size = self._borders[size]
        return size + (self._stop[size] == letter)
