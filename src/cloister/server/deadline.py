"""One timer for many short waits: a timer per token would cost more than the token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Deadline:
    """`asyncio.timeout` for all the waits of one thing: `with deadline: await ...`, from one task at a time.

    Args:
        delay_s: from now on; a wait that lasts longer, or begins later, ends with TimeoutError.
    """

    def __init__(self, delay_s: float) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._num_cancels = 0
        self._has_passed = False
        self._has_cancelled = False
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._pass)

    def __enter__(self) -> None:
        if self._has_passed:
            raise TimeoutError
        self._task = task = asyncio.current_task()
        self._num_cancels = task.cancelling() if task is not None else 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._has_cancelled and task is not None:
            self._has_cancelled = False
            # As asyncio.timeout: takes back its own cancellation, and passes on that of somebody else.
            if task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def close(self) -> None:
        """Stops the timer."""
        self._timer.cancel()

    def _pass(self) -> None:
        self._has_passed = True
        if self._task is not None:
            self._has_cancelled = self._task.cancel()


class Patience:
    """A bound for each of many waits, one after the other.

    Args:
        limit_s: how long one wait may last.
        give_up: called once when one has lasted that long.

    Attributes:
        since_s: when the present wait began, on the loop's clock; None between waits. Set by whoever waits, for every token.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self.since_s: float | None = None
        self._timer = self._loop.call_later(limit_s, self._look)

    def close(self) -> None:
        """Stops the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self.since_s is None else self.since_s) + self._limit_s
        if due_s <= now_s:
            self._give_up()
        else:
            self._timer = self._loop.call_at(due_s, self._look)
