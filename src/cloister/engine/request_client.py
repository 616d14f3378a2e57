"""What a server uses of an engine, or of several that serve one model."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cloister.engine.adapters import AdapterManager
from cloister.engine.cache_reports import REPORT_TIMEOUT_S, CacheReport
from cloister.engine.in_flight import EventListener, RequestObserver, Sink
from cloister.engine.mailbox import BATCH, Mailbox, wakeups_of
from cloister.engine.replica_snapshot import LengthErrors, ReplicaSnapshot, UpdateProgress
from cloister.types.errors import InvalidRequestError
from cloister.types.request import ModelInfo, Request, SequenceOutput
from cloister.types.scope import Scope

GRACE_S: Final = 10.0
"""Grace period after a request's deadline, which the engine enforces, before the client ends the request itself."""
ONE_ENGINE: Final = "this server has one engine; start it with --replicas 2 or more"
DRAIN_REPLICA_S: Final = 60.0
"""Longest time for draining a replica: the others may have no room."""


@dataclass(frozen=True, slots=True)
class Health:
    """The health of an engine: whether it makes progress.

    Attributes:
        good: steps advance, or no request waits.
        detail: one line for an operator, without content.
        is_idle: no engine runs, and the next request starts one.
        is_starting: a request has come to an idle engine, and the next one starts.
    """

    good: bool
    detail: str
    is_idle: bool = False
    is_starting: bool = False


class RequestClient(ABC):
    """What a server uses of an engine, or of several that serve one model (`cluster.ReplicaSet`). For one event loop.

    Attributes:
        model: the model that it serves.
        memory: itemised budget, (what, bytes).
        startup: startup times, (phase, seconds).
        adapters: loaded adapters, and calls to load and unload them.
    """

    model: ModelInfo
    memory: list[tuple[str, int]]
    startup: list[tuple[str, float]]
    adapters: AdapterManager

    @abstractmethod
    async def start(self) -> None:
        """Starts the engine, or connects to it, and waits until its model is loaded. Binds this client to the current event
        loop.

        Raises:
            CloisterError: the engine cannot start; the message says why.
        """

    @abstractmethod
    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, waits until the running ones have ended or `timeout_s` has passed, then stops the engine."""

    @property
    @abstractmethod
    def processes(self) -> list[tuple[str, int]]:
        """Name and process id of each engine that runs in a process of its own."""

    @abstractmethod
    def snapshots(self) -> list[ReplicaSnapshot]:
        """Returns the load of each replica."""

    def action_counts(self) -> Mapping[str, int]:
        """Returns how often replicas were drained, changed their roles or got new engines, and requests were moved by load."""
        return {}

    def length_errors(self) -> LengthErrors | None:
        """Returns how wrong predicted lengths of answers were; None if nothing predicts any."""
        return None

    @abstractmethod
    async def inspect_cache(self, scope: Scope, *, drop: bool = False, timeout_s: float = REPORT_TIMEOUT_S) -> CacheReport:
        """Returns what is cached of a scope, within `timeout_s`; an engine that does not answer by then is named.

        Args:
            drop: drop it after it was counted. An engine that does not answer drops it as soon as it reads its messages.
        """

    @abstractmethod
    def subscribe(self, listener: EventListener) -> None:
        """Registers `listener`, which is called on the event loop with every event of this client's requests and of
        every step."""

    @abstractmethod
    def health(self) -> Health:
        """Good while requests are accepted, and steps advance or no request waits."""

    @abstractmethod
    def fault(self) -> str | None:
        """Returns why the engine will not be started again; None while one runs or will be started."""

    @abstractmethod
    def submit(self, request: Request, sink: Sink, observer: RequestObserver | None = None) -> None:
        """Submits a request to the engine; `sink` is called with its outputs, `observer` with its events. Raises as
        `generate`."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Aborts a request that no longer has a waiter, if it has not ended."""

    @abstractmethod
    def expire(self, request_id: str) -> None:
        """Ends a request whose deadline the engine failed to enforce."""

    @abstractmethod
    def expire_held(self, request_id: str) -> None:
        """Ends a request at its deadline that no engine has yet because one is starting."""

    async def generate(
        self, request: Request, observer: RequestObserver | None = None, *, in_batches: bool = False
    ) -> AsyncGenerator[SequenceOutput, None]:
        """Submits a request at the first `anext` and yields new outputs of its sequences until the last one has ended. Outputs
        of one sequence that were not read in time are yielded as one (`SequenceOutput.join`).

        Closing the iterator early aborts the request; its blocks become free at the next step. Every sequence's last output
        carries a finish reason, errors included: the iterator itself raises only before the first output.

        Args:
            observer: called with the events of the request.
            in_batches: for a reader that shows no partial answers: it is woken when a sequence has ended or `BATCH` outputs are
                there, not for each token.

        Raises:
            QueueFullError: the queue is full (`max_waiting`).
            InvalidRequestError: its id is in use, or its `n` is zero or too large.
            EngineError: the engine is not running (restarting or draining).
        """
        # a reader in batches waits for no client, and leaves outputs here only until there are enough of them
        hold = None if observer is None or in_batches else observer.hold
        mailbox = Mailbox(wakeups_of(asyncio.get_running_loop()), BATCH if in_batches else 1, hold)
        self.submit(request, mailbox.put, observer)
        num_open = request.sampling.n
        try:
            with self._watch_deadline(request):  # wakes every waiter
                while num_open:
                    output = await mailbox.get()
                    num_open -= output.finish_reason is not None
                    yield output
        finally:
            mailbox.release()

    async def follow(self, request: Request, sink: Sink) -> None:
        """Submits a request, calls `sink` with every output, and returns after the last one.

        Like `generate`, but wakes no task for each token. An exception in `sink` ends the request and propagates.
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
        with self._watch_deadline(request):
            await done

    async def drain_replica(self, index: int, timeout_s: float = DRAIN_REPLICA_S) -> int:
        """Gives a replica no new requests until `return_replica`, and moves those that it has to others.

        Returns how many are left: those for which no other replica had room within `timeout_s`; they go on there.

        Raises:
            InvalidRequestError: there is no such replica, or no other one would be left.
        """
        raise InvalidRequestError(ONE_ENGINE, param="replica")

    def check_drain(self, index: int) -> None:
        """Raises InvalidRequestError if an operator may not drain a replica because no other one is healthy."""
        raise InvalidRequestError(ONE_ENGINE, param="replica")

    def return_replica(self, index: int) -> None:
        """Gives a replica requests again. Raises InvalidRequestError if there is no such replica."""
        raise InvalidRequestError(ONE_ENGINE, param="replica")

    def update_replicas(self, model: str | None = None) -> None:
        """Begins to replace the engine of one replica after another, while all requests go on (`cluster.rolling_update`).

        Args:
            model: other weights for the same front, as the setting `model` names them; None: those that are served.

        Raises:
            InvalidRequestError: there is one engine only, or an update is under way.
        """
        raise InvalidRequestError(ONE_ENGINE, param="replica")

    @property
    def update_progress(self) -> UpdateProgress | None:
        """The progress of the last update; None if there was none."""
        return None

    @contextlib.contextmanager
    def _watch_deadline(self, request: Request) -> Iterator[None]:
        """Limits the wait for a request's outputs, and aborts the request when the waiter leaves."""
        loop = asyncio.get_running_loop()
        timers = (
            loop.call_later(request.timeout_s, self.expire_held, request.request_id),
            loop.call_later(request.timeout_s + GRACE_S, self.expire, request.request_id),
        )
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            self.abort(request.request_id)
