"""The front's side of an engine: who waits for what. Every sequence of every request gets exactly one end (rule 4),
and the listeners exactly one `Ended` event for it, whatever becomes of the engine.

Used from one thread only. What ends here because the engine cannot say so any more looks as if the engine had said it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from cloister.engine.base import EventListener, Health
from cloister.engine.ends import end_output
from cloister.engine.faults import describe
from cloister.engine.watchdog import Watchdog
from cloister.types.clock import Clock
from cloister.types.errors import EngineError, InvalidRequestError, QueueFullError
from cloister.types.events import Abort, Arrived, Ended, Event, FrontMessage, Outputs, Progressed, Scheduled, Stepped, Submit
from cloister.types.request import FinishReason, Request, SequenceOutput

GRACE_S: Final = 10.0
"""How long past its deadline a request waits for the engine to say so, before the front ends it."""
_NUM_COMPLETIONS: Final = 64
_MAX_RETRY_S: Final = 60.0
_NO_ANSWER: Final = "the engine did not answer before the request's deadline; send it again"

_logger = logging.getLogger(__name__)

Sink = Callable[[SequenceOutput], None]


class _Mailbox:
    """Outputs from the event loop's callbacks to the one task that reads them; asyncio.Queue does more and costs more."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[SequenceOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: SequenceOutput) -> None:
        self._items.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> SequenceOutput:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class Ticket:
    """One request that the engine holds.

    Attributes:
        sink: gets its outputs; None when nobody waits for them any more.
        open: indexes of the sequences that have not ended.
    """

    __slots__ = (
        "arrival_s",
        "arrived",
        "first_token_s",
        "num_cached",
        "num_outputs",
        "open",
        "request",
        "seq_ids",
        "sink",
        "started",
    )

    def __init__(self, request: Request, sink: Sink, now: float) -> None:
        self.request = request
        self.sink: Sink | None = sink
        self.arrival_s = now
        self.arrived = False
        self.started = False
        self.first_token_s: float | None = None
        self.num_cached = 0
        self.open = set(range(request.sampling.n))
        self.seq_ids: dict[int, int] = {}
        self.num_outputs = dict.fromkeys(self.open, 0)

    def note(self, event: Event) -> None:
        """Keeps what an `Ended` event would need, should this side have to write it."""
        match event:
            case Progressed():
                self.seq_ids[event.index] = event.seq_id
                self.num_outputs[event.index] += event.num_tokens
                self.first_token_s = self.first_token_s if self.first_token_s is not None else event.now_s
            case Arrived():
                self.arrived, self.arrival_s = True, event.now_s
            case Scheduled(resumed=False):
                self.started, self.num_cached = True, event.num_cached_tokens
            case _:
                pass


class Desk:
    """Requests in flight between a front and its engine.

    Args:
        send: passes a message to the engine.
        max_waiting: requests that may wait for a slot.
        max_num_seqs: sequences that run at once; so many requests may come to an idle engine without waiting.

    Attributes:
        closed: why no request is taken at present, or None.
    """

    def __init__(self, send: Callable[[FrontMessage], None], clock: Clock, *, max_waiting: int, max_num_seqs: int) -> None:
        self.closed: str | None = None
        self._send = send
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_num_seqs = max_num_seqs
        self._tickets: dict[str, Ticket] = {}
        self._listeners: list[EventListener] = []
        self._completions_s: deque[float] = deque(maxlen=_NUM_COMPLETIONS)
        self._left_waiting = 0

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended, those included that nobody waits for any more."""
        return len(self._tickets)

    def knows(self, request_id: str) -> bool:
        """True if the request came from here and has not ended."""
        return request_id in self._tickets

    @property
    def num_waiting(self) -> int:
        """Requests that somebody waits for and that have not been scheduled yet."""
        return sum(1 for t in self._tickets.values() if not t.started and t.sink is not None)

    def health(self, watchdog: Watchdog) -> Health:
        """Good while requests are taken, and steps advance or nothing waits (rule 11)."""
        if self.closed is not None:
            return Health(False, self.closed)
        detail = f"{self.num_in_flight} requests in flight, {self.num_waiting} of them waiting"
        if watchdog.is_stalled:
            return Health(False, f"no step for {watchdog.stalled_s:.0f} s; {detail}")
        return Health(True, detail)

    def subscribe(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """As `AsyncEngine.generate`."""
        mailbox = _Mailbox()
        self.submit(request, mailbox.put)
        num_open = request.sampling.n
        with self._patience(request):  # ends every wait
            while num_open:
                output = await mailbox.get()
                num_open -= output.finish_reason is not None
                yield output

    async def follow(self, request: Request, sink: Sink) -> None:
        """Submits a request, calls `sink` with every output as it comes, and returns after the last one.

        As `generate` without a task to wake for every token. What `sink` raises ends the request, and is raised here.

        Raises:
            QueueFullError, EngineError: as `AsyncEngine.generate`.
        """
        done = asyncio.get_running_loop().create_future()
        num_open = request.sampling.n

        def take(output: SequenceOutput) -> None:
            nonlocal num_open
            if done.done():
                return
            try:
                sink(output)
            except Exception as error:
                done.set_exception(error)
                return
            num_open -= output.finish_reason is not None
            if not num_open:
                done.set_result(None)

        self.submit(request, take)
        with self._patience(request):
            await done

    @contextmanager
    def _patience(self, request: Request) -> Iterator[None]:
        """Bounds the wait for a request's outputs, and gives it up when nobody waits any more."""
        patience_s = request.timeout_s + GRACE_S
        timer = asyncio.get_running_loop().call_later(patience_s, self.give_up, request.request_id)
        try:
            yield
        finally:
            timer.cancel()
            self.abandon(request.request_id)

    # From the clients

    def has_room(self) -> bool:
        """True if one more request may wait."""
        # Requests the engine has not answered yet do not count as waiting while it has slots for them; whether it has,
        # the last step says: if it left somebody waiting, there are none (or no memory for them).
        num_running = sum(len(t.open) for t in self._tickets.values() if t.started)
        num_slots = 0 if self._left_waiting else max(0, self._max_num_seqs - num_running)
        return self.num_waiting < self._max_waiting + num_slots

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands a request to the engine.

        Raises:
            EngineError: the engine is not there.
            QueueFullError: too many wait.
            InvalidRequestError: its id is in use, or it asks for no sequence.
        """
        if self.closed is not None:
            raise EngineError(self.closed)
        if not self.has_room():
            raise QueueFullError(
                f"{self.num_waiting} requests wait already; try again later", retry_after_s=self._estimate_retry_s()
            )
        if request.request_id in self._tickets:
            raise InvalidRequestError("the request id is in use; choose another one", param="request_id")
        if not 1 <= request.sampling.n <= self._max_num_seqs:  # before anything is made for each of them
            raise InvalidRequestError(f"n must be from 1 to {self._max_num_seqs}, the sequences that run at once", param="n")
        self._send(Submit(request))
        self._tickets[request.request_id] = Ticket(request, sink, self._clock.now())

    def abandon(self, request_id: str) -> None:
        """Nobody waits for a request any more; if it has not ended, the engine is told."""
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.sink is not None:
            ticket.sink = None
            self._send(Abort(request_id))

    def give_up(self, request_id: str) -> None:
        """Ends a request that the engine should have ended long ago."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._send(Abort(request_id))
            self._end(ticket, FinishReason.TIMEOUT, _NO_ANSWER)

    def _estimate_retry_s(self) -> float:
        """Time until half of those who wait now have started, at the recent rate of completions."""
        if len(self._completions_s) < 2:
            return 1.0
        span_s = max(1e-3, self._clock.now() - self._completions_s[0])
        return min(_MAX_RETRY_S, self.num_waiting / 2 * span_s / len(self._completions_s))

    # From the engine

    def deliver(self, message: Outputs) -> None:
        """Passes on what a step brought; ends of sequences that have ended already are dropped."""
        for event in message.events:
            if self._is_news(event):
                self._tell(event)
        for output in message.outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is not None and output.index in ticket.open:
                self._pass_on(ticket, output)

    def fail_all(self, message: str) -> None:
        """The engine is gone: ends everything in flight, with `message` as the reply."""
        self._left_waiting = 0
        for ticket in list(self._tickets.values()):
            self._end(ticket, FinishReason.ERROR if ticket.sink is not None else FinishReason.ABORT, message)

    def _is_news(self, event: Event) -> bool:
        if isinstance(event, Stepped):
            self._left_waiting = event.num_waiting
            return True
        ticket = self._tickets.get(event.request_id)
        if ticket is None or (isinstance(event, Ended) and event.index not in ticket.open):
            return False
        ticket.note(event)
        return True

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception as error:  # a listener's fault must not keep answers back
                _logger.error("an event listener failed: %s", describe(error))

    def _pass_on(self, ticket: Ticket, output: SequenceOutput) -> None:
        if ticket.sink is not None:
            ticket.sink(output)
        if output.finish_reason is not None:
            ticket.open.discard(output.index)
        if not ticket.open:
            del self._tickets[output.request_id]
            self._completions_s.append(self._clock.now())

    def _end(self, ticket: Ticket, reason: FinishReason, error: str) -> None:
        request_id, num_prompt = ticket.request.request_id, len(ticket.request.token_ids)
        now = self._clock.now()
        if not ticket.arrived:
            self._tell(Arrived(request_id, ticket.arrival_s, num_prompt))
        for index in sorted(ticket.open):
            ended = Ended(
                request_id=request_id,
                seq_id=ticket.seq_ids.get(index, -1),
                index=index,
                now_s=now,
                reason=reason,
                num_prompt_tokens=num_prompt,
                num_output_tokens=ticket.num_outputs[index],
                num_cached_tokens=ticket.num_cached,
                arrival_s=ticket.arrival_s,
                first_token_s=ticket.first_token_s,
                last=len(ticket.open) == 1,
                error=error,
            )
            self._tell(ended)
            self._pass_on(ticket, end_output(ended))
