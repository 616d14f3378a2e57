"""How outputs reach the tasks of the front that read them: a mailbox for each request, and the order of wakeups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

from cloister.types.request import SequenceOutput, TokenLogprobs

BATCH: Final = 32
"""Outputs that a reader of whole answers gets at once. They occupy the event loop for half a millisecond."""
WAKEUPS_A_TURN: Final = 4
"""Streams that get a token in one turn of the event loop; the next turn looks for new requests and messages first."""


class Wakeups:
    """Wakes the readers of outputs on an event loop: readers of a first output at once, the others a few per turn.

    A step has tokens for every stream, and each task takes some 50 us to write its text. Woken together they would hold the
    loop for milliseconds, during which no new request is read and no first token of another engine is passed on.
    """

    __slots__ = ("_is_due", "_waiters")

    def __init__(self) -> None:  # it must not refer to its loop, whose end ends it (`_wakeups`)
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    def add(self, waiter: asyncio.Future[None], *, is_first: bool) -> None:
        """Wakes a task, after those that were added before unless it `is_first`."""
        if is_first:
            waiter.set_result(None)
            return
        self._waiters.append(waiter)
        if not self._is_due:
            self._is_due = True
            waiter.get_loop().call_soon(self._wake)

    def _wake(self) -> None:
        for _ in range(min(WAKEUPS_A_TURN, len(self._waiters))):
            waiter = self._waiters.popleft()
            if not waiter.done():  # its task was cancelled meanwhile
                waiter.set_result(None)
        self._is_due = bool(self._waiters)
        if self._is_due:
            self._waiters[0].get_loop().call_soon(self._wake)


class Mailbox:
    """Queue of outputs from event loop callbacks to the one task that reads them; cheaper than asyncio.Queue.

    Outputs of a sequence that its task has not read yet are joined, so that a front that is slower than its engines writes
    fewer and longer pieces and does not fall behind.

    Args:
        batch: outputs for which the task is woken; the end of a sequence wakes it too.
        hold: called with the change of the bytes that outputs in the queue take.
    """

    __slots__ = ("_batch", "_hold", "_items", "_loop", "_num_bytes", "_num_kept", "_waiter", "_wakeups")

    def __init__(self, wakeups: Wakeups, batch: int = 1, hold: Callable[[int], None] | None = None) -> None:
        self._batch = batch
        self._items: deque[SequenceOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._wakeups = wakeups
        self._loop = asyncio.get_running_loop()
        self._num_kept = 0
        self._hold = hold
        self._num_bytes: deque[int] = deque()  # of each output in the queue

    def put(self, output: SequenceOutput) -> None:
        num_bytes = measure(output) if self._hold is not None and self._items else 0  # what is taken at once takes none
        if num_bytes and self._hold is not None:
            self._hold(num_bytes)
        # not with the first output, which is to come soon
        if self._batch == 1 and self._items and self._num_kept > 1 and (joined := self._items[-1].join(output)) is not None:
            self._items[-1] = joined
            self._num_bytes[-1] += num_bytes
            return  # its task has been woken but has not read yet
        self._items.append(output)
        self._num_bytes.append(num_bytes)
        self._num_kept += 1
        if len(self._items) < self._batch and output.finish_reason is None:
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self._wakeups.add(waiter, is_first=self._num_kept == 1)

    async def get(self) -> SequenceOutput:
        while not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        if (num_bytes := self._num_bytes.popleft()) and self._hold is not None:
            self._hold(-num_bytes)
        return self._items.popleft()

    def release(self) -> None:
        """Stops counting the outputs in the queue: nobody reads them."""
        if self._hold is not None and (num_bytes := sum(self._num_bytes)):
            self._hold(-num_bytes)
        self._items.clear()
        self._num_bytes.clear()


_OUTPUT_BYTES: Final = 340
_TOKEN_BYTES: Final = 40
_LOGPROBS_BYTES: Final = 240
_TOP_BYTES: Final = 170


def measure(output: SequenceOutput) -> int:
    """Returns about how many bytes an output takes in memory (Python 3.11: objects, lists, numbers and texts)."""
    num_bytes = _OUTPUT_BYTES + len(output.text) + _TOKEN_BYTES * len(output.token_ids)
    if output.logprobs is not None:
        num_bytes += sum(map(_measure_logprobs, output.logprobs))
    if output.prompt_logprobs is not None:
        num_bytes += sum(_measure_logprobs(found) for found in output.prompt_logprobs if found is not None)
    return num_bytes if output.embedding is None else num_bytes + len(output.embedding.data)


def _measure_logprobs(found: TokenLogprobs) -> int:
    return _LOGPROBS_BYTES + _TOP_BYTES * len(found.top)


_wakeups: WeakKeyDictionary[asyncio.AbstractEventLoop, Wakeups] = WeakKeyDictionary()


def wakeups_of(loop: asyncio.AbstractEventLoop) -> Wakeups:
    """Returns those of a loop: all clients of its engines share them."""
    return _wakeups.get(loop) or _wakeups.setdefault(loop, Wakeups())
