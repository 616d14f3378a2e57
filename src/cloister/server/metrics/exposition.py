"""What stands behind `/metrics`."""

from __future__ import annotations

from typing import Final, Protocol

from cloister.types.events import Event

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Exposition(Protocol):
    """Takes what happens, and tells it to Prometheus."""

    def observe(self, event: Event) -> None:
        """Takes one event of the engine."""
        ...

    def count_reply(self, route: str, status: int) -> None:
        """Takes the outcome of one HTTP request; `route` is the template, never the path."""
        ...

    def render(self) -> bytes:
        """Returns the text that Prometheus reads."""
        ...
