"""Schedules token purchases: ahead of need and at a random time, so that a purchase cannot be linked to a request.

The issuer sees purchases with API keys, and the gateway sees requests without; together they can compare times. A purchase that
a request waits for links the two. One at a random time minutes later matches every client that sent requests meanwhile.
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
"""The time is drawn uniformly from this many seconds after the wallet ran low. A longer interval hides better, but the wallet
is more often empty before its end."""
MOST_LOW: Final = 8 * LOW
"""Low-water mark for frequent requests. 20 more tokens arrive after two and a half minutes on average, so a client with a
request every eight seconds never waits for a purchase; one with more eventually does."""
CLOSE_S: Final = 5.0


class PurchasePlan:
    """The time of the next purchase. No I/O, no clock.

    Args:
        below: random source; default: the system's.
    """

    def __init__(self, below: Below = secrets.randbelow) -> None:
        self._below = below
        self._low = LOW
        self._due: float | None = None

    def see(self, num_tokens: int, now: float) -> None:
        """Updates the number of tokens left: draws a time once they are few, and drops it when they are many again.

        If the time passed without a purchase (the machine slept, or no program ran), it is drawn again: buying now would
        coincide with a request.
        """
        if num_tokens > self._low:
            self._due = None
        elif self._due is None or self._due <= now:
            self.postpone(now)

    def run_out(self) -> None:
        """Records that no token is left: if a purchase was planned too late, the low-water mark rises."""
        if self._due is not None:
            self._low, self._due = min(2 * self._low, MOST_LOW), None

    def postpone(self, now: float) -> None:
        """Draws another moment."""
        self._due = now + self._below(int(SPREAD_S * 1000)) / 1000

    def wait_s(self, now: float) -> float | None:
        """Returns the seconds until the purchase, 0 if it is due; None if there is nothing to buy."""
        return None if self._due is None else max(0.0, self._due - now)


class Restocker:
    """Runs one purchase at a time in a daemon thread; the program may exit before it ends."""

    def __init__(self, buy: Callable[[], None]) -> None:
        self._buy = buy
        self._timer: threading.Timer | None = None

    def plan(self, wait_s: float | None) -> None:
        """Buys after this many seconds, unless a purchase is planned or running; None plans nothing."""
        if wait_s is None or (self._timer is not None and self._timer.is_alive()):
            return
        self._timer = threading.Timer(wait_s, self._buy)
        self._timer.name, self._timer.daemon = "cloister purchase", True
        self._timer.start()

    def close(self) -> None:
        """Cancels a planned purchase, and waits briefly for a running one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join(CLOSE_S)


class AsyncRestocker:
    """Like `Restocker`, in a task. Without asyncio nothing is planned, and tokens are bought when none is left."""

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
        """Cancels a planned or running purchase."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _wait_and_buy(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._buy()
