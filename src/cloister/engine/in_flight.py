"""Requests between a front and its engine. Every sequence of every request ends exactly once, and listeners get exactly one
`Ended` event for it, whatever happens to the engine.

Used from one thread only. If the engine has ended, requests end here with the same events as from the engine. No I/O.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from cloister.engine.poison_requests import Standing, Suspect, choose_due, judge
from cloister.engine.replica_snapshot import RequestSnapshot
from cloister.engine.shadow import Shadow
from cloister.types.clock import Clock
from cloister.types.errors import InvalidRequestError, QueueFullError
from cloister.types.events import (
    ABORTED,
    Arrived,
    Ended,
    Event,
    KVLoaded,
    KVSource,
    Lost,
    Migrated,
    Outputs,
    Preempted,
    PrefillDone,
    Progressed,
    Resumption,
    Scheduled,
    Stepped,
    Submit,
    end_output,
)
from cloister.types.images import MAX_PIXELS_BYTES, MAX_REQUEST_PIXELS_BYTES, TOO_MANY_PIXELS
from cloister.types.logs import describe
from cloister.types.request import KEYLESS_TENANT, TENANT_RATIO, FinishReason, Request, SequenceOutput

_NUM_COMPLETIONS: Final = 64
_MAX_RETRY_S: Final = 60.0
NO_ANSWER: Final = "the engine did not answer before the request's deadline; send it again"
POISONED: Final = (
    "the engine died whenever it computed this request, the last time with no other request beside it, so it is not "
    "tried again; change the request"
)
PERHAPS_POISONED: Final = (
    "three engines died while they had this request, perhaps because of another one; send it again, and change it if "
    "that happens again"
)
"""For clients that cannot know what else an engine had, such as workers of a sealed node."""

_logger = logging.getLogger(__name__)

EventListener = Callable[[Event], None]
Sink = Callable[[SequenceOutput], None]


@dataclass(slots=True)
class EngineStats:
    """The engine's statistics of one request. Times are of the monotonic clock.

    Attributes:
        num_beam_tokens: as in `Ended`.
        fingerprint: of the weights of the engine that has or had it; they stay the same once its answer has begun.
        replicas: those that had it, in order; empty if there is one engine.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_beam_tokens: int = 0
    arrival_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    preempted_s: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    fingerprint: str = ""
    replicas: list[int] = field(default_factory=list)

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
                self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)  # documents may be found later
                self.num_output_tokens += event.num_output_tokens
                self.num_beam_tokens += event.num_beam_tokens
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

    def hold(self, num_bytes: int) -> None:
        """Called with the change of the bytes of its outputs that nobody has read yet."""
        ...


class InFlightRequest:
    """One request that the engine has.

    Attributes:
        sink: called with its outputs; None if nothing waits for them.
        open: indexes of the sequences that have not ended.
        seed: seed of its sampling noise, if the request has none.
        token_ids: its output so far, by index, from which another engine can resume it.
        is_prefilled: it was in its engine for its first token only, and has left it (`Submit.prefill_only`).
        suspect: its part in the deaths of its engines.
        arrived_s, first_token_s: when this side learned of it, by its own clock, which the engine need not share.
        source: endpoint of an engine that has its KV, for the next one that gets it.
        prefill_hold_s: that engine computes its first token only, and keeps its KV for this long; 0: it computes all.
    """

    __slots__ = (
        "_observer",
        "_progressed_s",
        "arrived_s",
        "first_token_s",
        "is_prefilled",
        "num_outputs",
        "open",
        "prefill_hold_s",
        "request",
        "seed",
        "seq_ids",
        "sink",
        "source",
        "stats",
        "submitted_s",
        "suspect",
        "token_ids",
    )

    def __init__(
        self, request: Request, sink: Sink, now: float, observer: RequestObserver | None = None, seed: int | None = None
    ) -> None:
        self.request = request
        self.seed = seed
        self.token_ids: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self.is_prefilled = False
        self.suspect = Suspect(prepares=request.sampling.grammar is not None or bool(request.images))
        self.arrived_s: float | None = None
        self.first_token_s: float | None = None
        self._progressed_s: float | None = None
        self.source: str | None = None
        self.prefill_hold_s = 0.0
        self.sink: Sink | None = sink
        self.submitted_s = now
        self.stats = EngineStats(len(request.token_ids)) if observer is None else observer.stats
        self.open = set(range(request.sampling.n))
        self.seq_ids: dict[int, int] = {}
        self.num_outputs = dict.fromkeys(self.open, 0)
        self._observer = observer

    def note(self, event: Event, clock: Clock) -> None:
        """Records what an `Ended` event needs, in case this side has to create it, and what the engine does with it."""
        if isinstance(event, Progressed):  # once for each token: few calls
            self.seq_ids[event.index] = event.seq_id
            self.num_outputs[event.index] += event.num_tokens
            if self.first_token_s is None:
                self.first_token_s, self.stats.first_token_s = clock.now(), event.now_s
            if event.now_s != self._progressed_s:  # its sequences progress in the same step
                self._progressed_s = event.now_s
                if self.suspect.standing is not Standing.CLEARED or self.suspect.num_idle_losses:
                    self.suspect.note_step()
            return
        self.is_prefilled |= isinstance(event, PrefillDone)
        if isinstance(event, Arrived):
            self.arrived_s = clock.now()
        elif isinstance(event, Scheduled | Preempted | Lost | Migrated):
            self.suspect.has_slot = isinstance(event, Scheduled)
        self.stats.follow(event)
        if self._observer is not None:
            _notify(self._observer.observe, event)

    @property
    def has_output(self) -> bool:
        """Whether any of its sequences has a token."""
        return any(self.token_ids)

    @property
    def is_begun(self) -> bool:
        """Whether its client has received part of its answer, which only the same weights can continue."""
        return self.has_output or len(self.open) < len(self.token_ids)

    def is_overdue(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return now >= self.submitted_s + self.request.timeout_s

    def snapshot(self, *, is_held: bool = False) -> RequestSnapshot:
        """Returns its progress."""
        return RequestSnapshot(
            request_id=self.request.request_id,
            num_prompt_tokens=len(self.request.token_ids),
            num_output_tokens=sum(len(self.token_ids[index]) for index in self.open),
            num_sequences=len(self.open),
            priority=self.request.priority,
            has_slot=self.suspect.has_slot,
            is_held=is_held,
        )

    def submission(self, now: float) -> Submit:
        """Returns the message that hands the request to another engine: the request itself, and its output from the engine that
        was lost. It has arrived."""
        stats = self.stats
        assert self.arrived_s is not None
        resumption = Resumption(
            token_ids=[list(ids) for ids in self.token_ids],
            ended=tuple(index for index in range(len(self.token_ids)) if index not in self.open),
            waited_s=now - self.arrived_s,
            first_token_after_s=None if self.first_token_s is None else self.first_token_s - self.arrived_s,
            was_scheduled=stats.scheduled_s is not None,
            num_cached_tokens=stats.num_cached_tokens,
        )
        source, self.source = self.source, None
        hold_s, self.prefill_hold_s = self.prefill_hold_s, 0.0
        kv_source = None if source is None else KVSource(source)
        return Submit(self.request, self.seed, resumption, kv_source, hold_kv_s=hold_s, prefill_only=hold_s > 0.0)

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
                arrival_s=self.submitted_s if self.arrived_s is None else self.arrived_s,
                first_token_s=self.first_token_s,
                last=len(self.open) == 1,
                error=error,
            )


class InFlightRequests:
    """All requests in flight, and the listeners to their events.

    Args:
        max_waiting: requests that may wait for a slot.
        max_num_seqs: sequences that run at once; an idle engine accepts this many requests without queueing.

    Attributes:
        fingerprint: of the engine's weights; None before the first one.
        holds_back: requests wait because one that may kill the engine is tried alone (`engine.poison_requests`).
    """

    def __init__(self, clock: Clock, *, max_waiting: int, max_num_seqs: int) -> None:
        self.fingerprint: str | None = None
        self.replica: int | None = None
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_num_seqs = max_num_seqs
        self._by_id: dict[str, InFlightRequest] = {}
        self._held: dict[str, InFlightRequest] = {}
        self.holds_back = False
        self._of_others: set[str] = set()
        self._leaving: Counter[str] = Counter()
        self._shadows: dict[str, tuple[InFlightRequest, Shadow]] = {}
        self._listeners: list[EventListener] = []
        self._completions_s: deque[float] = deque(maxlen=_NUM_COMPLETIONS)
        self._last_step: Stepped | None = None

    def __len__(self) -> int:
        """Requests that have not ended, including those without a waiter."""
        return len(self._by_id)

    @property
    def last_step(self) -> Stepped | None:
        """The engine's last step; None before the first one of an engine. Without a request the engine has no load, whatever
        that step left: it has ended or moved on since, without another step."""
        step = self._last_step
        if step is None or self.is_waited_for:
            return step
        return msgspec.structs.replace(step, num_running=0, num_waiting=0, num_held=0, num_used_blocks=0)

    @property
    def num_waiting(self) -> int:
        """Requests with a waiter that have not been scheduled yet."""
        return sum(1 for r in self._by_id.values() if r.stats.scheduled_s is None and r.sink is not None)

    @property
    def held_searches(self) -> list[InFlightRequest]:
        """Beam searches that wait for the share of all searches: as many as the last step said, the latest of those that have
        no slot."""
        step = self.last_step
        if step is None or not step.num_held:
            return []
        waiting = [r for r in self._by_id.values() if r.request.sampling.beams is not None and r.stats.scheduled_s is None]
        return [r for r in waiting if r.sink is not None][-step.num_held :]

    @property
    def num_leaving(self) -> int:
        """Requests that have left, and whose end the engine has not reported yet."""
        return self._leaving.total()

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return sum(len(r.request.token_ids) for r in self._by_id.values() if r.stats.first_token_s is None)

    @property
    def is_waited_for(self) -> bool:
        """Whether any requests are open, including those of workers with their own channels, shadows, and those that left and
        whose end the engine has not reported."""
        return bool(self._by_id or self._of_others or self._shadows or self._leaving)

    def has_room(self) -> bool:
        """True if another request may be queued, of some tenant."""
        return self.num_waiting < self._max_waiting + self._count_slots()

    def _count_slots(self) -> int:
        """Returns the free slots: requests without a reply yet do not count as waiting while there are some. If requests were
        still queued after the last step, there are none (or no memory for them)."""
        num_running = sum(len(r.open) for r in self._by_id.values() if r.stats.scheduled_s is not None)
        step = self.last_step
        return 0 if step is not None and step.num_queued else max(0, self._max_num_seqs - num_running)

    def has_room_for(self, tenant: str) -> bool:
        """True if a tenant may queue another request, in a queue that is not full: others find some places."""
        num_free = self._max_waiting + self._count_slots() - self.num_waiting
        if tenant == KEYLESS_TENANT or num_free > self._max_waiting:  # all have this name, or nobody has to wait
            return True
        waiting = (r for r in self._by_id.values() if r.stats.scheduled_s is None and r.sink is not None)
        return sum(r.request.tenant == tenant for r in waiting) < TENANT_RATIO * num_free

    def subscribe(self, listener: EventListener) -> None:
        """Registers `listener`, which is called with every event of these requests and of every step."""
        self._listeners.append(listener)

    def unsubscribe_all(self) -> None:
        """Forgets all listeners."""
        self._listeners.clear()

    def check(self, request: Request) -> None:
        """Checks whether another request can be accepted.

        Raises:
            QueueFullError: too many wait, of all or of this tenant, or those that are there have too many images.
            InvalidRequestError: its id is in use, its `n` is zero or too large, or its images are too many.
        """
        if not self.has_room():
            raise QueueFullError(
                f"{self.num_waiting} requests wait already; try again later", retry_after_s=self._estimate_retry_s()
            )
        if not self.has_room_for(request.tenant):
            raise QueueFullError(
                "too many requests of this key's tenant wait already; try again later", retry_after_s=self._estimate_retry_s()
            )
        if request.request_id in self._by_id or request.request_id in self._shadows:
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

    def add(
        self,
        request: Request,
        sink: Sink,
        observer: RequestObserver | None = None,
        *,
        seed: int | None = None,
        is_held: bool = False,
        source: str | None = None,
        prefill_hold_s: float = 0.0,
    ) -> None:
        """Adds a request that was checked; `sink` is called with its outputs, `observer` with its events.

        Args:
            is_held: the engine does not have it yet; `take_due` returns its message later.
            source: endpoint of an engine that has KV of the prompt, for that message.
            prefill_hold_s: that message asks for the first token only, and to keep the KV for this long; 0: for the whole
                answer.
        """
        found = self._by_id[request.request_id] = InFlightRequest(request, sink, self._clock.now(), observer, seed)
        self._note_engine(found)
        if is_held:
            self._held[request.request_id] = found
            found.source, found.prefill_hold_s = source, prefill_hold_s
            self._arrive(found)  # no engine reports it while none has it

    def is_held(self, request_id: str) -> bool:
        """Whether a request waits until the engine can have it."""
        return request_id in self._held

    def end_overdue(self) -> None:
        """Ends requests that are held and whose deadline has passed."""
        now = self._clock.now()
        for request_id in [request_id for request_id, found in self._held.items() if found.is_overdue(now)]:
            self.end(request_id, FinishReason.TIMEOUT, NO_ANSWER)

    def leave(self, request_id: str) -> bool:
        """Removes the waiter of a request; one that was held ends. Returns True if it had one and its engine has it."""
        found = self._by_id.get(request_id)
        if found is None or found.sink is None:
            return False
        found.sink = None
        if request_id in self._held:
            self.end(request_id, FinishReason.ABORT, ABORTED)
            return False
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
        self.holds_back = False
        for request_id, found in list(self._by_id.items()):
            self.end(request_id, FinishReason.ERROR if found.sink is not None else FinishReason.ABORT, error)

    @property
    def awaits_trial(self) -> bool:
        """Whether a request that may kill the engine waits to be tried."""
        return any(found.suspect.standing is Standing.CONFINED for found in self._held.values())

    def keep_resumable(self, error: str, *, is_dead: bool = True, is_shared: bool = False) -> int:
        """Holds the requests of an engine that has ended for another one. Ends those that nothing waits for, with `error` as
        the reply, those whose deadline has passed, and one that is found to kill its engines. Returns how many it keeps.

        Args:
            is_dead: False: perhaps only the network to it has failed, which no request can cause.
            is_shared: the engine may have had requests of clients that this one does not know.
        """
        sent = [found for request_id, found in self._by_id.items() if request_id not in self._held]
        culprit = None if self._of_others or not is_dead else judge([found.suspect for found in sent], is_shared=is_shared)
        if self._leaving:
            culprit = None  # it was not alone: the engine also had requests that were leaving it, shadows included
        self.lose_engine()
        now = self._clock.now()
        for found in sent:
            request_id = found.request.request_id
            if found.sink is None:
                self.end(request_id, FinishReason.ABORT, error)
            elif found.suspect is culprit:
                _logger.error("a request killed its engine again and again, the last time alone; it ends with an error")
                self.end(request_id, FinishReason.ERROR, PERHAPS_POISONED if is_shared else POISONED)
            else:
                self._arrive(found)
                self._happen(found, Lost(request_id, now))
        self._held = dict(self._by_id)
        self.end_overdue()  # its engine did not end them in time, and the next one may take long to start
        self.holds_back = self._has_confined()
        return len(self._by_id)

    def release(self, adopts: Callable[[InFlightRequest], bool], *, confined: bool = False) -> int:
        """Passes every held request to `adopts`, confined ones only if `confined`, and forgets those that it takes over.
        Returns how many remain."""
        for request_id, found in list(self._held.items()):
            if (confined or found.suspect.standing is not Standing.CONFINED) and adopts(found):
                del self._by_id[request_id], self._held[request_id]
        return len(self._by_id)

    def depart(self, request_id: str, *, is_running: bool) -> InFlightRequest | None:
        """Forgets a request that goes on in another engine; returns it, or None if it has ended, nothing waits
        for it, or it must be tried where it is.

        Everything that its engine still reports of it is dropped, up to its end there, because the other engine reports it too.
        So it may come back.

        Args:
            is_running: its engine runs, and will report its end once it has read an abort.
        """
        found = self._by_id.get(request_id)
        if found is None or found.sink is None:
            return None
        if found.suspect.standing is Standing.CONFINED and not found.is_prefilled:
            return None  # it is tried alone where it is
        self._happen(found, Migrated(request_id, self._clock.now()))
        del self._by_id[request_id]
        is_sent = self._held.pop(request_id, None) is None and not found.is_prefilled
        if is_running and is_sent:
            self._leaving[request_id] += 1
        return found

    def find(self, request_id: str) -> InFlightRequest | None:
        """Returns a request that has not ended."""
        return self._by_id.get(request_id)

    def uses_adapter(self, digest: str) -> bool:
        """Whether a request that has not ended has this adapter."""
        return any(found.request.adapter == digest for found in self._by_id.values())

    def snapshots(self) -> list[RequestSnapshot]:
        """Returns the progress of every request that something waits for, in the order of their arrival."""
        held = {found.request.request_id for found in self.held_searches}
        return [
            found.snapshot(is_held=request_id in held) for request_id, found in self._by_id.items() if found.sink is not None
        ]

    def _note_engine(self, found: InFlightRequest) -> None:
        found.stats.fingerprint = self.fingerprint or ""
        if self.replica is not None and found.stats.replicas[-1:] != [self.replica]:
            found.stats.replicas.append(self.replica)

    def adopt(self, found: InFlightRequest, source: str | None = None) -> None:
        """Adds a request that another engine had; `take_due` returns its message.

        Args:
            source: endpoint of an engine that has its KV.
        """
        found.is_prefilled, found.source, found.prefill_hold_s = False, source, 0.0
        self._note_engine(found)
        self._by_id[found.request.request_id] = self._held[found.request.request_id] = found
        self.holds_back = self.holds_back or found.suspect.standing is Standing.CONFINED

    # Shadows: requests that this engine computes beside another one, which has them (`engine.shadow`)

    @property
    def num_shadows(self) -> int:
        """Requests of other engines that this one computes too."""
        return len(self._shadows)

    def add_shadow(self, found: InFlightRequest) -> Shadow | None:
        """Adds a shadow of another engine's request; None if it must stay where it is."""
        is_fit = found.sink is not None and found.has_output and found.arrived_s is not None
        if not is_fit or found.suspect.standing is not Standing.CLEARED or found.request.request_id in self._shadows:
            return None
        shadow = Shadow(found.token_ids, found.open)
        self._shadows[found.request.request_id] = found, shadow
        return shadow

    def drop_shadow(self, request_id: str) -> bool:
        """Forgets a shadow. Returns whether the engine still computes it."""
        _, shadow = self._shadows.pop(request_id, (None, None))
        if shadow is None or shadow.is_over:
            return False
        self._leaving[request_id] += 1
        return True

    def take_over(self, request_id: str) -> None:
        """Makes a request of a shadow: its own engine has been told to abort it, and `depart` has returned it."""
        found, shadow = self._shadows.pop(request_id)
        found.is_prefilled, found.source = False, None
        found.seq_ids.update(shadow.seq_ids)
        self._by_id[request_id] = found
        now, left = self._clock.now(), set(found.open)
        for item in list(shadow.news(found.token_ids, found.open)):
            match item:  # nobody has seen it yet: it happens now
                case SequenceOutput():
                    self._pass_on(found, item)
                case Progressed():
                    self._happen(found, msgspec.structs.replace(item, now_s=now))
                case Ended():
                    left.discard(item.index)
                    times = {"now_s": now, "arrival_s": found.arrived_s, "first_token_s": found.first_token_s}  # of this clock
                    self._happen(found, msgspec.structs.replace(item, **times, last=not left))
                case _:
                    self._happen(found, item)

    def take_due(self) -> list[Submit]:
        """Returns the messages that hand requests that were held to the engine, in the order of their arrival; those that it
        must not have yet are held on."""
        if not (self._held or self.holds_back):
            return []
        now = self._clock.now()
        self.holds_back = self._has_confined()
        sent = [found.suspect for request_id, found in self._by_id.items() if request_id not in self._held]
        due = set(map(id, choose_due([found.suspect for found in self._held.values()], sent)))
        taken = [found for found in self._held.values() if id(found.suspect) in due]
        for found in taken:
            del self._held[found.request.request_id]
            self._arrive(found)
        return [found.submission(now) for found in taken]

    def _has_confined(self) -> bool:
        return any(found.suspect.standing is Standing.CONFINED for found in self._by_id.values())

    def lose_engine(self) -> None:
        """Forgets the load of an engine that has ended, and reports that never came."""
        self._last_step = None
        self._of_others.clear()
        self._leaving.clear()
        self._shadows.clear()

    def deliver(self, message: Outputs) -> None:
        """Dispatches the outputs and events of a step; drops ends of sequences that have already ended, and reports on requests
        that have left.

        An engine reports what an abort ends before the step that follows, so no message has tokens of a request both before
        it left and after its return; it may have both ends, in this order.

        Requests that get their first token come first: their waiters run in this order, and the engine names the newest last.
        """
        leaving, ends, beginning = set(self._leaving), Counter[str](), set[str]()
        for event in message.events:
            if isinstance(event, Ended) and event.request_id in self._leaving:
                ends[event.request_id] += 1
            elif isinstance(event, Progressed) and event.first:
                beginning.add(event.request_id)
            if self._is_news(event):
                self._tell(event)
        outputs = message.outputs
        if beginning:
            outputs = sorted(outputs, key=lambda output: output.request_id not in beginning)
        for output in outputs:
            if output.request_id in leaving:
                if output.finish_reason is None:
                    continue
                if ends[output.request_id]:
                    ends[output.request_id] -= 1
                    continue
            if output.request_id in self._shadows:
                self._shadows[output.request_id][1].take(output)
                continue
            found = self._by_id.get(output.request_id)
            if found is not None and output.index in found.open:
                self._pass_on(found, output)

    def _is_news(self, event: Event) -> bool:
        if isinstance(event, Stepped):
            self._last_step = event
            return True
        if event.request_id in self._leaving and not isinstance(event, KVLoaded):
            self._note_leaving(event)
            return False
        if event.request_id in self._shadows and not isinstance(event, KVLoaded):
            self._shadows[event.request_id][1].note(event)
            return False
        found = self._by_id.get(event.request_id)
        if found is None:
            self._note_other(event)
            return isinstance(event, KVLoaded)  # of a request that may come later (`PrefetchKV`)
        if isinstance(event, Ended) and event.index not in found.open:
            return False
        found.note(event, self._clock)
        return True

    def _arrive(self, found: InFlightRequest) -> None:
        """Reports the arrival of a request that no engine has reported: its time so far counts."""
        if found.arrived_s is None:
            request = found.request
            self._happen(found, Arrived(request.request_id, found.submitted_s, len(request.token_ids)))
            found.arrived_s = found.submitted_s

    def _happen(self, found: InFlightRequest, event: Event) -> None:
        found.note(event, self._clock)
        self._tell(event)

    def _note_leaving(self, event: Event) -> None:
        """Its engine has ended a request that left: from now on its reports of the same id are of the request's return."""
        if isinstance(event, PrefillDone) or (isinstance(event, Ended) and event.last):
            self._leaving[event.request_id] -= 1
            if not self._leaving[event.request_id]:
                del self._leaving[event.request_id]

    def _note_other(self, event: Event) -> None:
        """Counts requests of other clients, so that an engine that hangs on one of them is detected."""
        if isinstance(event, Arrived | Scheduled):  # a request that another engine had does not arrive again
            self._of_others.add(event.request_id)
        elif isinstance(event, PrefillDone) or (isinstance(event, Ended) and event.last):
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
            self._held.pop(output.request_id, None)
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
