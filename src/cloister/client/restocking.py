"""When tokens are bought: ahead of need and at a random moment, so that a purchase does not tell of the request beside it.

Whoever sees purchases (the issuer, by API key) and requests (the gateway, by none) compares times. A purchase that a request
waits for joins the two; one that comes minutes after some request, as was drawn, fits everybody who asked meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

import sniffio

from cloister.client.node_selection import Below
from cloister.client.token_purchase import LOW

SPREAD_S: Final = 300.0
"""The moment is drawn evenly from so many seconds after the wallet was low. A longer time hides better, and the wallet is empty
before it is over more often."""
MOST_LOW: Final = 8 * LOW
"""How many tokens are few for somebody who asks often. 20 more come in two and a half minutes on average, so who asks every
eight seconds never waits for a purchase; who asks more often does, in the end."""
CLOSE_S: Final = 5.0


class PurchasePlan:
    """The moment of the next purchase. No I/O, no clock.

    Args:
        below: random source; the system's.
    """

    def __init__(self, below: Below = secrets.randbelow) -> None:
        self._below = below
        self._low = LOW
        self._due: float | None = None

    def see(self, num_tokens: int, now: float) -> None:
        """Takes in how many tokens are left: draws a moment once they are few, and drops it when they are many again.

        One that went by unused, since the machine slept or nobody ran, is drawn anew: now would be right beside a request.
        """
        if num_tokens > self._low:
            self._due = None
        elif self._due is None or self._due <= now:
            self.postpone(now)

    def run_out(self) -> None:
        """Takes in that no token is left: where a moment was drawn and came too late, more are kept from now on."""
        if self._due is not None:
            self._low, self._due = min(2 * self._low, MOST_LOW), None

    def postpone(self, now: float) -> None:
        """Draws another moment."""
        self._due = now + self._below(int(SPREAD_S * 1000)) / 1000

    def wait_s(self, now: float) -> float | None:
        """Returns the seconds until then, 0 when it has come; None where there is nothing to buy."""
        return None if self._due is None else max(0.0, self._due - now)


class Restocker:
    """Runs one purchase at a time in a thread that nobody waits for; a program may end before it."""

    def __init__(self, buy: Callable[[], None]) -> None:
        self._buy = buy
        self._timer: threading.Timer | None = None

    def plan(self, wait_s: float | None) -> None:
        """Buys in so many seconds, unless a purchase is planned or runs; None plans nothing."""
        if wait_s is None or (self._timer is not None and self._timer.is_alive()):
            return
        self._timer = threading.Timer(wait_s, self._buy)
        self._timer.name, self._timer.daemon = "cloister purchase", True
        self._timer.start()

    def close(self) -> None:
        """Drops what is planned, and waits a moment for a purchase that runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join(CLOSE_S)


class AsyncRestocker:
    """As `Restocker`, in a task. Where there is no asyncio nothing is planned, and tokens are bought when none is left."""

    def __init__(self, buy: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._buy = buy
        self._task: asyncio.Task[None] | None = None

    def plan(self, wait_s: float | None) -> None:
        """See `Restocker.plan`."""
        if wait_s is None or sniffio.current_async_library() != "asyncio":
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._wait_and_buy(wait_s))

    async def close(self) -> None:
        """Drops what is planned or runs."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _wait_and_buy(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._buy()
