"""How slow a request body may be: it has to end in time, and to keep coming meanwhile (as Apache's mod_reqtimeout has it)."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Message, Receive

from cloister.server.body_budget import BodyCharge

GRACE_S: Final = 10.0
"""How long a client may stay away before its rate matters; short requests are there by then."""
BYTES_PER_S: Final = 4096
"""Slowest rate of a body, on average: what the slowest mobile networks carry."""


class ShedError(Exception):
    """The body gave way to others: there is no room for it now."""


class BodyPace:
    """How long the next piece of a body may take.

    Only time in which somebody waits for the client counts against its rate: a slow program behind this one is not its fault.

    Args:
        now_s: when the body began, on the clock of the event loop.
        timeout_s: for all of the body.
    """

    def __init__(self, now_s: float, timeout_s: float, *, grace_s: float = GRACE_S, bytes_per_s: float = BYTES_PER_S) -> None:
        self._ends_s = now_s + timeout_s
        self._credit_s = grace_s
        self._bytes_per_s = bytes_per_s

    def deadline(self, now_s: float) -> float:
        """Returns until when the next piece has to come."""
        return min(self._ends_s, now_s + self._credit_s)

    def count(self, waited_s: float, num_bytes: int) -> None:
        """Takes in a piece that was waited for."""
        self._credit_s += num_bytes / self._bytes_per_s - waited_s


async def receive_piece(receive: Receive, charge: BodyCharge, pace: BodyPace) -> Message:
    """Returns the next ASGI message of a body; its bytes are not charged yet.

    Raises:
        TimeoutError: it is too slow.
        ShedError: its body gave way meanwhile.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        async with asyncio.timeout_at(pace.deadline(began_s)) as wait:

            def stop() -> None:
                if not wait.expired():
                    wait.reschedule(loop.time())

            charge.on_shed = stop
            message = await receive()
    except TimeoutError:
        if charge.is_shed:
            raise ShedError from None
        raise
    finally:
        charge.on_shed = lambda: None
    if charge.is_shed:
        raise ShedError
    pace.count(loop.time() - began_s, len(message.get("body", b"")))
    return message
