"""One HTTP request from its head to its last byte, with the engine's work for it: for limits, the request log and traces.

Counts and times come from the engine's events. Nothing here is content: a route is its template, a model its
served name.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from starlette.types import Scope

from cloister.engine.in_flight import EngineStats
from cloister.engine.request_client import RequestClient
from cloister.policy.quotas import Account, Charge
from cloister.server.metrics.tenants import TenantFigures
from cloister.server.unread_replies import UnreadReply, reply_of
from cloister.types.errors import InvalidRequestError
from cloister.types.events import Ended, Event, Progressed, Stepped
from cloister.types.logs import describe
from cloister.types.request import Request, SequenceOutput

OUTPUT_BUDGET: Final = "output_budget"
"""State key for the number of paid output tokens; set by a sealed node."""
LEFT: Final = 499
"""Status recorded if the client disconnected before its reply began; never sent."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HttpCall:
    """One HTTP request.

    Attributes:
        call_id: random; sent in the header `x-request-id`.
        began_s, ended_s: start, and time of the reply's last byte, on the monotonic clock.
        traceparent: the client's header of that name (W3C Trace Context), as received.
        client: address of the client.
        account: limits of its API key.
        charge: charge to its key.
        output_budget: output tokens that it may still request, from the blind token that paid for it; None for no limit.
        route: template of its route, `none` for an unknown route.
        engine_stats: by id of the engine's request.
        unread: the account of its unread reply; None if nothing bounds it.
    """

    method: str
    client: str | None
    traceparent: bytes | None
    began_s: float
    call_id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")
    route: str = "none"
    status: int = LEFT
    ended_s: float | None = None
    account: Account | None = None
    charge: Charge | None = None
    output_budget: int | None = None
    engine_stats: dict[str, EngineStats] = field(default_factory=dict)
    num_open: int = 0
    unread: UnreadReply | None = None

    def sum(self, count: Callable[[EngineStats], int]) -> int:
        """Returns a count over all prompts of the call."""
        return sum(map(count, self.engine_stats.values()))


CallListener = Callable[[HttpCall], None]
"""Called with each finished call, once its reply has ended and the engine has finished its work."""
ReplyCounter = Callable[[str, int], None]
"""Called with (route template, status) of every reply, just before its end is sent."""


def count_unread(count: Callable[[], None]) -> CallListener:
    """Returns a listener that calls `count` for each call whose reply was ended because its client did not read it."""

    def listen(call: HttpCall) -> None:
        if call.unread is not None and call.unread.is_ended:
            count()

    return listen


class HttpCalls:
    """The calls that are open. Used from one event loop.

    Args:
        count_reply: called with every reply.
        listeners: called with each finished call.
        tenants: metrics of each tenant; None if they may not be shown.

    Attributes:
        num_at_work: number of requests in the engine.
    """

    def __init__(
        self, count_reply: ReplyCounter, listeners: Sequence[CallListener] = (), tenants: TenantFigures | None = None
    ) -> None:
        self.tenants = tenants
        self._count_reply = count_reply
        self._listeners = tuple(listeners)
        self.num_at_work = 0

    def open(self, scope: Scope) -> HttpCall:
        """Begins a call and stores it in the request's state."""
        client = scope.get("client")
        traceparents = [value for name, value in scope["headers"] if name == b"traceparent"]
        call = HttpCall(
            method=scope["method"],
            client=client[0] if client else None,
            traceparent=traceparents[0] if len(traceparents) == 1 else None,
            began_s=time.monotonic(),
        )
        state = scope.setdefault("state", {})
        call.output_budget = state.get(OUTPUT_BUDGET)
        call.unread = reply_of(scope)
        state["call"] = call
        return call

    def close(self, call: HttpCall, route: str, status: int | None) -> None:
        """Ends the HTTP part of a call; status None means that no reply began."""
        if call.ended_s is not None:
            return
        call.ended_s, call.route = time.monotonic(), route
        if status is not None:
            call.status = status
            self._count_reply(route, status)
        self._end_if_over(call)

    def leave(self, call: HttpCall) -> None:
        """Gives back a closed call's place among the concurrent requests of its key: its reply has left this process."""
        if call.charge is not None:
            call.charge.leave(refund=call.status == 429 or call.status >= 500)

    def generate(
        self, engine: RequestClient, call: HttpCall, request: Request, *, in_batches: bool = False
    ) -> AsyncGenerator[SequenceOutput, None]:
        """Like `RequestClient.generate`, charged to a call. Iterate it immediately, because the charge is made here.

        Raises:
            RateLimitError: the call exceeds the limits of its key.
            InvalidRequestError: the call's blind token does not pay for its answers.
        """
        request = fit_budget(request, call)
        observer = self.begin(call, request, engine.model.max_model_len)
        return engine.generate(request, observer, in_batches=in_batches)

    def begin(self, call: HttpCall, request: Request, max_model_len: int) -> PromptOfCall:
        """Registers a request before it is sent to the engine, charges its maximum cost, and returns its observer.

        Raises:
            RateLimitError: the call exceeds the limits of its key.
        """
        if call.charge is not None:
            call.charge.reserve(request.request_id, most_tokens(request, max_model_len), time.time())
        stats = call.engine_stats[request.request_id] = EngineStats(len(request.token_ids))
        call.num_open += 1
        self.num_at_work += 1
        if self.tenants is not None:
            self.tenants.begin(request)
        return PromptOfCall(self, call, request.request_id, stats)

    def finish_prompt(self, prompt: PromptOfCall, num_tokens: int) -> None:
        """Records that the engine has finished a request, with `num_tokens` processed."""
        if prompt.is_finished:
            return
        prompt.is_finished = True
        self.num_at_work -= 1
        if self.tenants is not None:
            self.tenants.end(prompt.request_id)
        call = prompt.call
        call.num_open -= 1
        if call.charge is not None:
            call.charge.refund(prompt.request_id, num_tokens)
        self._end_if_over(call)

    def _end_if_over(self, call: HttpCall) -> None:
        if call.ended_s is None or call.num_open:
            return
        for listener in self._listeners:
            try:
                listener(call)
            except Exception as error:  # a failing listener must not block a reply
                _logger.error("a listener to calls failed: %s", describe(error))


@dataclass(slots=True, eq=False)
class PromptOfCall:
    """One prompt of a call in the engine: a `RequestObserver`."""

    calls: HttpCalls
    call: HttpCall
    request_id: str
    stats: EngineStats
    is_finished: bool = False

    def refuse(self) -> None:
        """Called if the engine did not accept the request, so that no `Ended` event will come."""
        self.calls.finish_prompt(self, 0)

    def observe(self, event: Event) -> None:
        """Processes one event of the request."""
        if isinstance(event, Progressed | Stepped):
            return
        if self.calls.tenants is not None:
            self.calls.tenants.observe(event)
        if isinstance(event, Ended) and event.last:
            num_output = max(self.stats.num_output_tokens, self.stats.num_beam_tokens)
            self.calls.finish_prompt(self, self.stats.num_prompt_tokens + num_output)

    def hold(self, num_bytes: int) -> None:
        """Counts outputs for which the reply has no room yet."""
        if self.call.unread is not None:
            self.call.unread.queue(num_bytes)


def fit_budget(request: Request, call: HttpCall) -> Request:
    """Returns the request limited to the rest of its call's budget, and deducts its maximum output from that.

    Longer answers end with the reason `length`, as at the end of the context window.

    Raises:
        InvalidRequestError: the budget does not suffice for its answers, or for their `min_tokens`.
    """
    sampling = request.sampling
    if call.output_budget is None or sampling.max_tokens == 0:
        return request
    most = call.output_budget // sampling.num_sequences
    if most < max(1, sampling.min_tokens):
        raise InvalidRequestError(
            "the token that pays for this request has too few output tokens left for all of its answers; ask for fewer answers,"
            " or send several requests",
            param="n" if sampling.num_sequences > 1 else "min_tokens",
            code="token_budget_exceeded",
        )
    wanted = most if sampling.max_tokens is None else min(sampling.max_tokens, most)
    call.output_budget -= wanted * sampling.num_sequences
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, max_tokens=wanted))


def call_of(scope: Scope) -> HttpCall | None:
    """Returns the call of a request; None if calls are not tracked."""
    call = scope.get("state", {}).get("call")
    return call if isinstance(call, HttpCall) else None


def most_tokens(request: Request, max_model_len: int) -> int:
    """Returns the most tokens, prompt and answers, that a request can make the engine handle."""
    room = max(0, max_model_len - len(request.token_ids))
    wanted = request.sampling.max_tokens
    return len(request.token_ids) + request.sampling.num_sequences * (room if wanted is None else min(wanted, room))
