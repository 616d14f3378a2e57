"""Requests between a front and its engine. Every sequence of every request ends exactly once, and listeners get exactly one
`Ended` event for it, whatever happens to the engine.

Used from one thread only. If the engine has ended, requests end here with the same events as from the engine. No I/O.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from cloister.types.clock import Clock
from cloister.types.errors import InvalidRequestError, QueueFullError
from cloister.types.events import (
    Arrived,
    Ended,
    Event,
    Lost,
    Outputs,
    Preempted,
    Progressed,
    Resumption,
    Scheduled,
    Stepped,
    Submit,
    end_output,
)
from cloister.types.images import MAX_PIXELS_BYTES, MAX_REQUEST_PIXELS_BYTES, TOO_MANY_PIXELS
from cloister.types.logs import describe
from cloister.types.request import FinishReason, Request, SequenceOutput

_NUM_COMPLETIONS: Final = 64
_MAX_RETRY_S: Final = 60.0
MAX_RESUMES: Final = 2
"""How often a request is resumed: one that kills its engine must not do so for ever."""

_logger = logging.getLogger(__name__)

EventListener = Callable[[Event], None]
Sink = Callable[[SequenceOutput], None]


@dataclass(slots=True)
class EngineStats:
    """The engine's statistics of one request. Times are of the monotonic clock."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    arrival_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    preempted_s: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def follow(self, event: Event) -> None:
        """Adds one event of the request; `Ended` holds the totals of the `Progressed` events."""
        match event:
            case Arrived():
                self.arrival_s, self.num_prompt_tokens = event.now_s, event.num_prompt_tokens
            case Scheduled(resumed=False):
                self.scheduled_s, self.num_cached_tokens = event.now_s, event.num_cached_tokens
            case Preempted():
                self.preempted_s.append(event.now_s)
            case Ended():
                self.reasons.append(event.reason.value)
                self.num_output_tokens += event.num_output_tokens
                self.first_token_s, self.ended_s = event.first_token_s, event.now_s
            case _:
                pass


class RequestObserver(Protocol):
    """Callbacks for the submitter of a request.

    Attributes:
        stats: updated while the engine has the request.
    """

    stats: EngineStats

    def refuse(self) -> None:
        """Called if the request was not accepted."""
        ...

    def observe(self, event: Event) -> None:
        """Called with each event of the request, without its tokens, after `stats` was updated."""
        ...


class InFlightRequest:
    """One request that the engine has.

    Attributes:
        sink: called with its outputs; None if nothing waits for them any more.
        open: indexes of the sequences that have not ended.
        seed: seed of its sampling noise, if the request has none.
        token_ids: its output so far, by index, from which another engine can resume it.
        num_resumes: how often its engine was lost.
    """

    __slots__ = (
        "_observer",
        "num_outputs",
        "num_resumes",
        "open",
        "request",
        "seed",
        "seq_ids",
        "sink",
        "stats",
        "submitted_s",
        "token_ids",
    )

    def __init__(
        self, request: Request, sink: Sink, now: float, observer: RequestObserver | None = None, seed: int | None = None
    ) -> None:
        self.request = request
        self.seed = seed
        self.token_ids: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self.num_resumes = 0
        self.sink: Sink | None = sink
        self.submitted_s = now
        self.stats = EngineStats(len(request.token_ids)) if observer is None else observer.stats
        self.open = set(range(request.sampling.n))
        self.seq_ids: dict[int, int] = {}
        self.num_outputs = dict.fromkeys(self.open, 0)
        self._observer = observer

    def note(self, event: Event) -> None:
        """Records what an `Ended` event needs, in case this side has to create it."""
        if isinstance(event, Progressed):
            self.seq_ids[event.index] = event.seq_id
            self.num_outputs[event.index] += event.num_tokens
            if self.stats.first_token_s is None:
                self.stats.first_token_s = event.now_s
            return
        self.stats.follow(event)
        if self._observer is not None:
            _notify(self._observer.observe, event)

    def submission(self, now: float) -> Submit:
        """Returns the message that hands the request to another engine: what it was, and what it had in one that was lost. It
        has arrived."""
        stats = self.stats
        assert stats.arrival_s is not None
        resumption = Resumption(
            token_ids=self.token_ids,
            ended=tuple(index for index in range(len(self.token_ids)) if index not in self.open),
            waited_s=now - stats.arrival_s,
            first_token_after_s=None if stats.first_token_s is None else stats.first_token_s - stats.arrival_s,
            was_scheduled=stats.scheduled_s is not None,
            num_cached_tokens=stats.num_cached_tokens,
        )
        return Submit(self.request, self.seed, resumption)

    def ends(self, reason: FinishReason, error: str, now: float) -> Iterator[Ended]:
        """Yields an `Ended` event for each open sequence, in place of the engine. The caller closes each before it takes the
        next."""
        for index in sorted(self.open):
            yield Ended(
                request_id=self.request.request_id,
                seq_id=self.seq_ids.get(index, -1),
                index=index,
                now_s=now,
                reason=reason,
                num_prompt_tokens=len(self.request.token_ids),
                num_output_tokens=self.num_outputs[index],
                num_cached_tokens=self.stats.num_cached_tokens,
                arrival_s=self.submitted_s if self.stats.arrival_s is None else self.stats.arrival_s,
                first_token_s=self.stats.first_token_s,
                last=len(self.open) == 1,
                error=error,
            )


class InFlightRequests:
    """All requests in flight, and the listeners to their events.

    Args:
        max_waiting: requests that may wait for a slot.
        max_num_seqs: sequences that run at once; an idle engine accepts this many requests without queueing.

    Attributes:
        last_step: the engine's last step; None before the first one of an engine.
    """

    def __init__(self, clock: Clock, *, max_waiting: int, max_num_seqs: int) -> None:
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_num_seqs = max_num_seqs
        self._by_id: dict[str, InFlightRequest] = {}
        self._of_others: set[str] = set()
        self._listeners: list[EventListener] = []
        self._completions_s: deque[float] = deque(maxlen=_NUM_COMPLETIONS)
        self.last_step: Stepped | None = None

    def __len__(self) -> int:
        """Requests that have not ended, including those without a waiter."""
        return len(self._by_id)

    @property
    def num_waiting(self) -> int:
        """Requests with a waiter that have not been scheduled yet."""
        return sum(1 for r in self._by_id.values() if r.stats.scheduled_s is None and r.sink is not None)

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return sum(len(r.request.token_ids) for r in self._by_id.values() if r.stats.first_token_s is None)

    @property
    def is_waited_for(self) -> bool:
        """Whether any requests are open, including those of workers with their own channels."""
        return bool(self._by_id or self._of_others)

    def has_room(self) -> bool:
        """True if another request may be queued."""
        # Requests without a reply yet do not count as waiting while the engine has free slots. If requests still waited after
        # the last step, there are none (or no memory for them).
        num_running = sum(len(r.open) for r in self._by_id.values() if r.stats.scheduled_s is not None)
        num_slots = 0 if self.last_step is not None and self.last_step.num_waiting else max(0, self._max_num_seqs - num_running)
        return self.num_waiting < self._max_waiting + num_slots

    def subscribe(self, listener: EventListener) -> None:
        """Registers `listener`, which is called with every event of these requests and of every step."""
        self._listeners.append(listener)

    def check(self, request: Request) -> None:
        """Checks whether another request can be accepted.

        Raises:
            QueueFullError: too many wait, or those that are there have too many images.
            InvalidRequestError: its id is in use, its `n` is zero or too large, or its images are too many.
        """
        if not self.has_room():
            raise QueueFullError(
                f"{self.num_waiting} requests wait already; try again later", retry_after_s=self._estimate_retry_s()
            )
        if request.request_id in self._by_id:
            raise InvalidRequestError("the request id is in use; choose another one", param="request_id")
        if not 1 <= request.sampling.n <= self._max_num_seqs:  # checked before anything is allocated for each sequence
            raise InvalidRequestError(f"n must be from 1 to {self._max_num_seqs}, the sequences that run at once", param="n")
        if request.images:
            self._check_pixels(request.pixels_bytes)

    def _check_pixels(self, num_bytes: int) -> None:
        if num_bytes > MAX_REQUEST_PIXELS_BYTES:
            raise InvalidRequestError(TOO_MANY_PIXELS, param="messages")
        if num_bytes + sum(found.request.pixels_bytes for found in self._by_id.values()) > MAX_PIXELS_BYTES:
            raise QueueFullError(
                "requests with too many images wait already; try again later", retry_after_s=self._estimate_retry_s()
            )

    def add(self, request: Request, sink: Sink, observer: RequestObserver | None = None, *, seed: int | None = None) -> None:
        """Adds a request that was checked; `sink` is called with its outputs, `observer` with its events."""
        self._by_id[request.request_id] = InFlightRequest(request, sink, self._clock.now(), observer, seed)

    def leave(self, request_id: str) -> bool:
        """Removes the waiter of a request. Returns True if it had one and has not ended."""
        found = self._by_id.get(request_id)
        if found is None or found.sink is None:
            return False
        found.sink = None
        return True

    def end(self, request_id: str, reason: FinishReason, error: str) -> bool:
        """Ends a request in place of the engine, with `error` as the reply; returns False if it had ended."""
        found = self._by_id.get(request_id)
        if found is None:
            return False
        now = self._clock.now()
        self._arrive(found)
        for ended in found.ends(reason, error, now):
            self._happen(found, ended)
            self._pass_on(found, end_output(ended))
        return True

    def end_all(self, error: str) -> None:
        """Ends all requests of an engine that has ended, with `error` as the reply."""
        self.lose_engine()
        for request_id, found in list(self._by_id.items()):
            self.end(request_id, FinishReason.ERROR if found.sink is not None else FinishReason.ABORT, error)

    def keep_resumable(self, error: str) -> int:
        """Ends the requests of an engine that has ended, with `error` as the reply, but for those that another engine can
        resume: something waits for their output, and not too many engines were lost with them. Returns how many it keeps."""
        self.lose_engine()
        now = self._clock.now()
        for request_id, found in list(self._by_id.items()):
            if found.sink is None or found.num_resumes >= MAX_RESUMES:
                self.end(request_id, FinishReason.ERROR if found.sink is not None else FinishReason.ABORT, error)
            else:
                found.num_resumes += 1
                self._arrive(found)
                self._happen(found, Lost(request_id, now))
        return len(self._by_id)

    def release(self, adopts: Callable[[InFlightRequest], bool]) -> int:
        """Passes every request to `adopts`, and forgets those that it takes over. Returns how many remain."""
        self._by_id = {request_id: found for request_id, found in self._by_id.items() if not adopts(found)}
        return len(self._by_id)

    def adopt(self, found: InFlightRequest) -> None:
        """Adds a request that another client's engine had."""
        self._by_id[found.request.request_id] = found

    def submissions(self) -> list[Submit]:
        """Returns the messages that hand all requests in flight to another engine, in the order of their arrival."""
        now = self._clock.now()
        for found in self._by_id.values():
            self._arrive(found)
        return [found.submission(now) for found in self._by_id.values()]

    def lose_engine(self) -> None:
        """Forgets the load of an engine that has ended."""
        self.last_step = None
        self._of_others.clear()

    def deliver(self, message: Outputs) -> None:
        """Dispatches the outputs and events of a step; drops ends of sequences that have already ended."""
        for event in message.events:
            if self._is_news(event):
                self._tell(event)
        for output in message.outputs:
            found = self._by_id.get(output.request_id)
            if found is not None and output.index in found.open:
                self._pass_on(found, output)

    def _is_news(self, event: Event) -> bool:
        if isinstance(event, Stepped):
            self.last_step = event
            return True
        found = self._by_id.get(event.request_id)
        if found is None:
            self._note_other(event)
            return False
        if isinstance(event, Ended) and event.index not in found.open:
            return False
        found.note(event)
        return True

    def _arrive(self, found: InFlightRequest) -> None:
        """Reports the arrival of a request that no engine has reported."""
        if found.stats.arrival_s is None:
            request = found.request
            self._happen(found, Arrived(request.request_id, found.submitted_s, len(request.token_ids)))

    def _happen(self, found: InFlightRequest, event: Event) -> None:
        found.note(event)
        self._tell(event)

    def _note_other(self, event: Event) -> None:
        """Counts requests of other clients, so that an engine that hangs on one of them is detected."""
        if isinstance(event, Arrived):
            self._of_others.add(event.request_id)
        elif isinstance(event, Ended) and event.last:
            self._of_others.discard(event.request_id)

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            _notify(listener, event)

    def _pass_on(self, found: InFlightRequest, output: SequenceOutput) -> None:
        found.token_ids[output.index] += output.token_ids
        if found.sink is not None:
            found.sink(output)
        if output.finish_reason is not None:
            found.open.discard(output.index)
        if not found.open:
            del self._by_id[output.request_id]
            self._completions_s.append(self._clock.now())

    def _estimate_retry_s(self) -> float:
        """Estimated time until half of the waiting requests have started, at the recent rate of completions."""
        if len(self._completions_s) < 2:
            return 1.0
        span_s = max(1e-3, self._clock.now() - self._completions_s[0])
        return min(_MAX_RETRY_S, self.num_waiting / 2 * span_s / len(self._completions_s))


def _notify(listener: EventListener, event: Event) -> None:
    try:
        listener(event)
    except Exception as error:  # an exception in a listener must not block outputs
        _logger.error("an event listener failed: %s", describe(error))
