"""The queue of prompts to read: tenants share the threads fairly, so that the backlog of one does not delay the others.

Reading is everything that turns a body into a job: parsing, templates, tokens; for images, decoding. As in
`scheduler.policies.fair`, each tenant has a counter of the work done for it, here in seconds, and the one with the smallest
counter goes first (VTC, Sheng et al. 2024). A tenant that was idle starts at the virtual time: absence earns no credit. A
reading cannot be interrupted, so long ones never hold the last thread: a short one waits for short ones only, however many
tenants send long ones.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from cloister.server.load_shedding import BODY_CEILING_BYTES
from cloister.types.errors import QueueFullError

T = TypeVar("T")

NUM_BODY_BYTES: Final = "num_body_bytes"
"""State key of a request for the size of its body."""
MAX_WAITING: Final = 1024
"""Limit on waiting readings of one tenant."""
LONG_BYTES: Final = 128 * 2**10
"""A body from this size on is long: one of text takes about 0.1 s on one core."""
MAX_WAITING_BYTES: Final = BODY_CEILING_BYTES // 2
"""Limit on the bytes of one tenant's waiting bodies: half of what all bodies may take."""


@dataclass(slots=True, eq=False)
class ReadingTurn:
    """One reading: it waits, then holds a slot until `end`.

    Attributes:
        order: rank of its arrival.
        granted: done when it may begin.
        began_s: None while it waits.
    """

    queue: ReadingQueue
    tenant: _Tenant
    num_bytes: int
    order: int
    is_long: bool
    granted: asyncio.Future[None]
    began_s: float | None = None

    def end(self) -> None:
        """Passes the slot on. Call it on the event loop, once."""
        self.queue._end(self)


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant's counter and its readings.

    Attributes:
        counter: seconds of reading that have ended; while it was idle, the virtual time.
        short, long: what waits, oldest first.
    """

    counter: float
    short: deque[ReadingTurn] = field(default_factory=deque)
    long: deque[ReadingTurn] = field(default_factory=deque)
    running: list[ReadingTurn] = field(default_factory=list)
    waiting_bytes: int = 0

    @property
    def is_active(self) -> bool:
        return bool(self.running or self.short or self.long)

    @property
    def num_waiting(self) -> int:
        return len(self.short) + len(self.long)

    def queue_of(self, turn: ReadingTurn) -> deque[ReadingTurn]:
        return self.long if turn.is_long else self.short

    def head(self, *, with_long: bool) -> ReadingTurn | None:
        """Returns its oldest reading that may begin."""
        heads = [*([self.long[0]] if with_long and self.long else []), *([self.short[0]] if self.short else [])]
        return min(heads, key=lambda turn: turn.order, default=None)

    def work_s(self, now_s: float) -> float:
        """Returns the seconds of reading done for it, current readings included."""
        return self.counter + sum(now_s - turn.began_s for turn in self.running if turn.began_s is not None)


class ReadingQueue:
    """Decides which reading begins next. Used from one event loop.

    Args:
        num_slots: readings at once.
        max_waiting: readings of one tenant that may wait.
        max_waiting_bytes: limit on their bytes; a single reading may have more.
        long_bytes: readings from this size on are long.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        long_bytes: int = LONG_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_slots = num_slots
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._long_bytes = long_bytes
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._num_turns = 0
        self._virtual_s = 0.0

    async def enter(self, tenant: str, num_bytes: int) -> ReadingTurn:
        """Waits until a tenant may read this many bytes. The caller ends the turn. May be cancelled.

        Raises:
            QueueFullError: too much of this tenant waits already.
        """
        turn = self._add(tenant, num_bytes)
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn.began_s is None:
                turn.tenant.queue_of(turn).remove(turn)
                turn.tenant.waiting_bytes -= turn.num_bytes
                self._forget_idle()
            else:  # it was granted in the same moment
                turn.end()
            raise
        return turn

    def _add(self, name: str, num_bytes: int) -> ReadingTurn:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(0.0)
        if not tenant.is_active:
            tenant.counter = max(tenant.counter, self._advance())
        is_over = tenant.waiting_bytes and tenant.waiting_bytes + num_bytes > self._max_waiting_bytes
        if tenant.num_waiting >= self._max_waiting or is_over:
            raise QueueFullError("Too many prompts of this key wait to be read already; send it again in a moment.")
        self._num_turns += 1
        is_long = num_bytes >= self._long_bytes
        turn = ReadingTurn(self, tenant, num_bytes, self._num_turns, is_long, asyncio.get_running_loop().create_future())
        tenant.queue_of(turn).append(turn)
        tenant.waiting_bytes += num_bytes
        self._grant()
        return turn

    def _end(self, turn: ReadingTurn) -> None:
        assert turn.began_s is not None
        tenant = turn.tenant
        tenant.running.remove(turn)
        tenant.counter += self._clock() - turn.began_s
        self._grant()
        self._forget_idle()

    def _grant(self) -> None:
        """Begins readings while there are slots for them."""
        while (turn := self._next()) is not None:
            tenant = turn.tenant
            tenant.queue_of(turn).popleft()
            tenant.waiting_bytes -= turn.num_bytes
            tenant.running.append(turn)
            turn.began_s = self._clock()
            if not turn.granted.cancelled():  # otherwise it ends as soon as its task runs
                turn.granted.set_result(None)

    def _next(self) -> ReadingTurn | None:
        running = [turn for tenant in self._tenants.values() for turn in tenant.running]
        if len(running) >= self.num_slots:
            return None
        with_long = sum(turn.is_long for turn in running) < max(1, self.num_slots - 1)
        now_s = self._clock()
        heads = [(tenant, head) for tenant in self._tenants.values() if (head := tenant.head(with_long=with_long)) is not None]
        best = min(heads, key=lambda found: (found[0].work_s(now_s), found[1].order), default=None)
        return None if best is None else best[1]

    def _advance(self) -> float:
        """Returns the virtual time: the least work done for any tenant that reads or waits, current readings excluded."""
        active = [tenant.counter for tenant in self._tenants.values() if tenant.is_active]
        self._virtual_s = max(self._virtual_s, min(active, default=0.0))
        return self._virtual_s

    def _forget_idle(self) -> None:
        """Drops tenants that would start at the virtual time anyway, so that names do not accumulate."""
        if not any(tenant.is_active for tenant in self._tenants.values()):  # no tenant is left to compare with
            self._virtual_s = max([self._virtual_s, *(tenant.counter for tenant in self._tenants.values())])
        least_s = self._advance()
        self._tenants = {name: one for name, one in self._tenants.items() if one.is_active or one.counter > least_s}


class ReadingThreads:
    """Threads that read prompts, outside of the event loop and in the order of a queue. Used from one event loop.

    Args:
        queue: has a slot for each thread. A thread starts with each reading and ends with it: a sealed node forks a process
            that has read a prompt, and may have no other thread.
    """

    def __init__(self, queue: ReadingQueue) -> None:
        self._queue = queue
        self._loop_is_taken = False

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T], *, is_quick: bool = False) -> T:
        """Waits for the tenant's turn, then runs a reading of this many bytes in a thread, with the context of the caller.

        Cancelling ends the wait. A reading that has begun goes on and keeps its slot until it ends, so that clients that leave
        and come back get no more threads than others.

        Args:
            is_quick: it takes less time than a thread needs to start and to get the interpreter lock from a busy event loop. It
                runs on the loop, one per turn; further ones get threads, so that a flood of them is shared fairly too.

        Raises:
            QueueFullError: too much of this tenant waits already.
        """
        turn = await self._queue.enter(tenant, num_bytes)
        if is_quick and self._take_loop():
            try:
                return work()
            finally:
                turn.end()
        future = self._start(turn, work)
        try:
            return await future
        finally:
            del future  # its error holds this frame: only the garbage collector would free both, and the body

    def _take_loop(self) -> bool:
        """Returns True once per turn of the event loop."""
        is_free, self._loop_is_taken = not self._loop_is_taken, True
        if is_free:
            asyncio.get_running_loop().call_soon(self._free_loop)
        return is_free

    def _free_loop(self) -> None:
        self._loop_is_taken = False

    def _start(self, turn: ReadingTurn, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        read = partial(_read, contextvars.copy_context(), work, loop, future, turn)
        try:
            _thread.start_new_thread(read, ())  # threading.Thread.start would stop the loop until the thread runs
        except BaseException:
            turn.end()
            raise
        return future


def _read(
    context: contextvars.Context,
    work: Callable[[], T],
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    turn: ReadingTurn,
) -> None:
    """Reads, in a thread of its own; the result, or the error, arrives on the event loop."""
    try:
        finish = partial(_finish, turn, future, context.run(work), None)
    except BaseException as error:
        finish = partial(_finish, turn, future, None, error)
    try:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(finish)
    finally:
        del finish, future  # as in `run`


def _finish(turn: ReadingTurn, future: asyncio.Future[Any], read: object, error: BaseException | None) -> None:
    """Ends a turn, on the event loop; its caller gets the result or the error, unless it has left."""
    turn.end()
    if future.done():
        return
    if error is None:
        future.set_result(read)
    else:
        future.set_exception(error)
