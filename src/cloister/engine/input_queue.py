"""What the front told the engine and no step knows of yet: messages that were not read, requests whose grammar is being
compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from cloister.types.events import FrontMessage
from cloister.types.grammar import Grammar
from cloister.types.request import Request


class InputQueue:
    """A queue from any thread to the engine's thread, which reads all of it between two steps."""

    def __init__(self) -> None:
        self._messages: list[FrontMessage] = []
        self._is_woken = False
        self._arrived = threading.Condition()

    def put(self, message: FrontMessage) -> None:
        """Adds a message and wakes the engine."""
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()

    def wake(self) -> None:
        """Wakes the engine without a message: something that it waits for is done."""
        with self._arrived:
            self._is_woken = True
            self._arrived.notify()

    def take(self) -> list[FrontMessage]:
        """Returns every message that is there, oldest first, and forgets them."""
        with self._arrived:
            messages, self._messages = self._messages, []
            self._is_woken = False
        return messages

    def wait(self, timeout_s: float) -> None:
        """Returns as soon as a message is there or the engine was woken, or after `timeout_s`."""
        with self._arrived:
            if not (self._messages or self._is_woken):
                self._arrived.wait(timeout_s)


# Requests whose grammar is being compiled. They reach the scheduler afterwards, so that no step waits for a compilation.


COMPILE_TIMEOUT_S: Final = 5.0
"""How long a grammar may take; after that its request goes on, and fails with the reason."""


class GrammarCompilation(Protocol):
    """What compiles beside the engine's thread."""

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool: ...

    def give_up(self, grammar: Grammar) -> bool: ...


class CompilingRequests:
    """The requests that wait for their grammar.

    Args:
        grammars: compiles; None lets every request pass at once.
        wake: called from another thread when one is done.

    Attributes:
        held: by request id: what waits, its grammar, and when it waits no longer.
    """

    def __init__(self, grammars: GrammarCompilation | None, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self.held: dict[str, tuple[Request, Grammar, float]] = {}

    @property
    def next_deadline_s(self) -> float | None:
        """When `take_ready` must be called again even if nothing else happens."""
        return min((deadline_s for _, _, deadline_s in self.held.values()), default=None)

    def hold(self, request: Request, now: float) -> bool:
        """True if a request has to wait, and is kept here."""
        grammar = request.sampling.grammar
        if grammar is None or self._grammars is None or self._grammars.prepare(grammar, self._wake):
            return False
        self.held[request.request_id] = (request, grammar, now + COMPILE_TIMEOUT_S)
        return True

    def take_ready(self, now: float) -> list[Request]:
        """Returns the requests that need not wait any more, in the order in which they came."""
        ready = []
        for request_id, (request, grammar, deadline_s) in list(self.held.items()):
            if self._is_ready(grammar, deadline_s, now):
                ready.append(request)
                del self.held[request_id]
            elif now >= deadline_s:
                self.held[request_id] = (request, grammar, now + COMPILE_TIMEOUT_S)
        return ready

    def drop(self, request_id: str) -> Request | None:
        """Returns a request that waits here and shall wait no longer, or None."""
        held = self.held.pop(request_id, None)
        return None if held is None else held[0]

    def _is_ready(self, grammar: Grammar, deadline_s: float, now: float) -> bool:
        assert self._grammars is not None
        if now >= deadline_s and self._grammars.give_up(grammar):
            return True
        return self._grammars.prepare(grammar, self._wake)
