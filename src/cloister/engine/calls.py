"""The front's calls to an engine other than requests. Used from one event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from cloister.types.errors import EngineError
from cloister.types.events import FrontMessage

Reply = TypeVar("Reply")


class EngineCalls(Generic[Reply]):
    """Calls that wait for their replies.

    Args:
        send: passes a message to the engine.
    """

    def __init__(self, send: Callable[[FrontMessage], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)  # each front has a channel of its own to an engine
        self._waiting: dict[str, asyncio.Future[Reply]] = {}

    async def call(self, make: Callable[[str], FrontMessage], timeout_s: float) -> Reply:
        """Sends what `make` returns for an id, and returns the reply.

        Raises:
            TimeoutError: the engine did not answer in time.
            EngineError: the engine ended.
        """
        call_id = str(next(self._numbers))
        waiting = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(make(call_id))
            return await asyncio.wait_for(waiting, timeout_s)
        finally:
            self._waiting.pop(call_id, None)

    def deliver(self, call_id: str, reply: Reply) -> None:
        """Dispatches a reply; one that comes too late is dropped."""
        waiting = self._waiting.pop(call_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def fail_all(self, message: str) -> None:
        """Called when the engine has ended."""
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if not one.done():
                one.set_exception(EngineError(message))
