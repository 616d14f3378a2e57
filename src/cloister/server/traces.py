"""A call as spans: the request, and inside it the queue, the prefill and the decode of every prompt. Pure.

Attributes come from one list, named after OpenTelemetry's conventions for HTTP and generative AI; none of them is content. Of
what a client sends, its trace and span ids are taken (W3C Trace Context, section 3.2) and nothing else: `tracestate` and
`baggage` may hold anything.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import cloister
from cloister.server.calls import Call, EngineWork
from cloister.server.logs import QUIET_ROUTES, method_of
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider


AttributeValue = str | int | float | tuple[str, ...]

ALLOWED: Final = frozenset(
    {
        "cloister.num_preemptions",
        "cloister.num_prompts",
        "cloister.request_id",
        "error.type",
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.response.finish_reasons",
        "gen_ai.response.model",
        "gen_ai.response.time_to_first_chunk",
        "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "http.request.method",
        "http.response.status_code",
        "http.route",
    }
)
_OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class Parent:
    """The span of a client that a request belongs to."""

    trace_id: int
    span_id: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times are of the monotonic clock.

    Attributes:
        is_request: it is the request as a whole, which the others are parts of.
        failed: the server is at fault.
        moments: (name, time) of what happened on the way.
    """

    name: str
    start_s: float
    end_s: float
    is_request: bool = False
    failed: bool = False
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    moments: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        assert self.attributes.keys() <= ALLOWED


def parse_traceparent(header: bytes | None) -> Parent | None:
    """Returns the parent that a `traceparent` header names, None when there is none or it is not well-formed."""
    found = _TRACEPARENT.fullmatch(header) if header is not None else None
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return Parent(trace_id, span_id, bool(int(found[4], 16) & 1)) if trace_id and span_id else None


def spans_of(call: Call, model_name: str) -> list[Span]:
    """Returns the spans of a call that is over, the request first; none for what machines ask every few seconds.

    Args:
        model_name: as clients know it.
    """
    if call.ended_s is None or call.route in QUIET_ROUTES:
        return []
    # A client that left is not waited for, but what the engine still did for it belongs to it.
    end_s = max([call.ended_s, *(work.ended_s for work in call.works.values() if work.ended_s is not None)])
    whole = Span(
        name=f"{method_of(call)} {call.route}",
        start_s=call.began_s,
        end_s=end_s,
        is_request=True,
        failed=call.status >= 500,
        attributes=_attributes(call, model_name),
    )
    return [whole, *(span for work in call.works.values() for span in _phases(work))]


def _attributes(call: Call, model_name: str) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "cloister.request_id": call.call_id,
        "http.request.method": method_of(call),
        "http.response.status_code": call.status,
        "http.route": call.route,
    }
    if call.status >= 400:
        found["error.type"] = str(call.status)
    if not call.works:
        return found
    found |= {
        "cloister.num_preemptions": call.sum(lambda work: len(work.preempted_s)),
        "cloister.num_prompts": len(call.works),
        "gen_ai.provider.name": "cloister",
        "gen_ai.request.model": model_name,
        "gen_ai.response.finish_reasons": tuple(reason for work in call.works.values() for reason in work.reasons),
        "gen_ai.response.model": model_name,
        "gen_ai.usage.cache_read.input_tokens": call.sum(lambda work: work.num_cached_tokens),
        "gen_ai.usage.input_tokens": call.sum(lambda work: work.num_prompt_tokens),
        "gen_ai.usage.output_tokens": call.sum(lambda work: work.num_output_tokens),
    }
    if (operation := _OPERATIONS.get(call.route)) is not None:
        found["gen_ai.operation.name"] = operation
    first = [work.first_token_s for work in call.works.values() if work.first_token_s is not None]
    if first:
        found["gen_ai.response.time_to_first_chunk"] = min(first) - call.began_s
    return found


def _phases(work: EngineWork) -> Iterator[Span]:
    """Yields what a prompt went through, as far as it came."""
    if work.arrival_s is None or work.ended_s is None:
        return
    borders = (work.arrival_s, work.scheduled_s, work.first_token_s, work.ended_s)
    for name, start_s, next_s in zip(("queue", "prefill", "decode"), borders, borders[1:], strict=False):
        if start_s is not None:
            end_s = work.ended_s if next_s is None else next_s
            moments = tuple(("preempted", moment) for moment in work.preempted_s if start_s <= moment < end_s)
            yield Span(name, start_s, end_s, moments=moments)


# Sends spans to an OpenTelemetry collector (OTLP over HTTP), from a thread of its own: a collector that is slow or gone costs
# spans, never a request.


EXPORT_TIMEOUT_S: Final = 10.0
CLOSE_S: Final = 2.0
"""How long the last spans may take when the server stops."""
DELAY_S: Final = 2.0
MAX_WAITING: Final = 4096
"""Spans that may wait for the collector; further ones are dropped."""
_PATH: Final = "/v1/traces"


class Tracer:
    """Makes spans of calls that are over.

    Args:
        endpoint: of the collector, such as http://localhost:4318.
        model_name: as clients know it.
        delay_s: how long spans are gathered before they are sent.

    Raises:
        ConfigError: the endpoint is no address, or the extra `otel` is not installed.
    """

    def __init__(self, endpoint: str, model_name: str, *, delay_s: float = DELAY_S) -> None:
        self._model_name = model_name
        self._provider = _provide(_address(endpoint), delay_s)
        self._tracer = self._provider.get_tracer("cloister", cloister.__version__)

    def write(self, call: Call) -> None:
        """Queues the spans of one call; never waits."""
        spans = spans_of(call, self._model_name)
        if spans:
            self._emit(spans, parse_traceparent(call.traceparent))

    def close(self) -> None:
        """Sends what is left, as far as it goes in a moment."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _emit(self, spans: Sequence[Span], parent: Parent | None) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset_ns = time.time_ns() - time.monotonic_ns()
        context = _context(parent)
        for span in spans:
            made = self._tracer.start_span(
                span.name,
                context=context,
                kind=SpanKind.SERVER if span.is_request else SpanKind.INTERNAL,
                attributes=dict(span.attributes),
                start_time=offset_ns + int(span.start_s * 1e9),
            )
            if span.is_request:
                context = set_span_in_context(made)
            for name, moment_s in span.moments:
                made.add_event(name, timestamp=offset_ns + int(moment_s * 1e9))
            if span.failed:
                made.set_status(Status(StatusCode.ERROR))
            made.end(offset_ns + int(span.end_s * 1e9))


def open_tracer(config: ServerConfig, model_name: str) -> Tracer | None:
    """Returns the tracer that the settings ask for, if they ask for one.

    Args:
        model_name: the model's own, for when clients know it under no other.

    Raises:
        ConfigError: it cannot be made.
    """
    if config.otlp_endpoint is None:
        return None
    return Tracer(config.otlp_endpoint, next(iter(config.served_names), model_name))


def _address(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError("otlp_endpoint must be an address such as http://localhost:4318", param="otlp_endpoint")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}{_PATH}"


def _provide(address: str, delay_s: float) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "otlp_endpoint needs OpenTelemetry; install it with: pip install 'cloister[otel]'", param="otlp_endpoint"
        ) from None
    # An unreachable collector is told once per failed batch; the transport's own words would say it thrice.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    provider = TracerProvider(
        resource=Resource({"service.name": "cloister", "service.version": cloister.__version__}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=address, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING, schedule_delay_millis=delay_s * 1000))
    return provider


def _context(parent: Parent | None) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    return set_span_in_context(NonRecordingSpan(SpanContext(parent.trace_id, parent.span_id, True, flags)), Context())
