"""Stop strings, found in text that comes in pieces."""

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
        certain = len(held) - self._num_uncertain(held)
        self._held = held[certain:]
        return held[:certain], None

    def flush(self) -> str:
        """Returns the text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _num_uncertain(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
