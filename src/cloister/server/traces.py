"""OpenTelemetry spans of each request, exported over OTLP from a background thread.

Attributes come from one list, named after OpenTelemetry's conventions for HTTP and generative AI; none of them is content. From
the client only trace and span ids are used (W3C Trace Context, section 3.2): `tracestate` and `baggage` may contain anything.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import cloister
from cloister.engine.in_flight import EngineStats
from cloister.server.calls import HttpCall
from cloister.server.logs import QUIET_ROUTES, method_of
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError
from cloister.types.extras import install_command

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
    """The client's parent span of a request."""

    trace_id: int
    span_id: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times are of the monotonic clock.

    Attributes:
        is_request: it is the span of the whole request, the parent of the others.
        failed: the server is at fault.
        moments: (name, time) of its events.
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
    """Returns the parent span from a `traceparent` header, None if it is missing or malformed."""
    found = _TRACEPARENT.fullmatch(header) if header is not None else None
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return Parent(trace_id, span_id, bool(int(found[4], 16) & 1)) if trace_id and span_id else None


def spans_of(call: HttpCall, model_name: str) -> list[Span]:
    """Returns the spans of a finished call, the request first; none for polled routes.

    Args:
        model_name: the model's name for clients.
    """
    if call.ended_s is None or call.route in QUIET_ROUTES:
        return []
    # A call ends when its client disconnects, but the engine's remaining work belongs to it.
    end_s = max([call.ended_s, *(stats.ended_s for stats in call.engine_stats.values() if stats.ended_s is not None)])
    whole = Span(
        name=f"{method_of(call)} {call.route}",
        start_s=call.began_s,
        end_s=end_s,
        is_request=True,
        failed=call.status >= 500,
        attributes=_attributes(call, model_name),
    )
    return [whole, *(span for stats in call.engine_stats.values() for span in _phases(stats))]


def _attributes(call: HttpCall, model_name: str) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "cloister.request_id": call.call_id,
        "http.request.method": method_of(call),
        "http.response.status_code": call.status,
        "http.route": call.route,
    }
    if call.status >= 400:
        found["error.type"] = str(call.status)
    if not call.engine_stats:
        return found
    found |= {
        "cloister.num_preemptions": call.sum(lambda stats: len(stats.preempted_s)),
        "cloister.num_prompts": len(call.engine_stats),
        "gen_ai.provider.name": "cloister",
        "gen_ai.request.model": model_name,
        "gen_ai.response.finish_reasons": tuple(reason for stats in call.engine_stats.values() for reason in stats.reasons),
        "gen_ai.response.model": model_name,
        "gen_ai.usage.cache_read.input_tokens": call.sum(lambda stats: stats.num_cached_tokens),
        "gen_ai.usage.input_tokens": call.sum(lambda stats: stats.num_prompt_tokens),
        "gen_ai.usage.output_tokens": call.sum(lambda stats: stats.num_output_tokens),
    }
    if (operation := _OPERATIONS.get(call.route)) is not None:
        found["gen_ai.operation.name"] = operation
    first = [stats.first_token_s for stats in call.engine_stats.values() if stats.first_token_s is not None]
    if first:
        found["gen_ai.response.time_to_first_chunk"] = min(first) - call.began_s
    return found


def _phases(stats: EngineStats) -> Iterator[Span]:
    """Yields the phases of a prompt, as far as it got."""
    if stats.arrival_s is None or stats.ended_s is None:
        return
    borders = (stats.arrival_s, stats.scheduled_s, stats.first_token_s, stats.ended_s)
    for name, start_s, next_s in zip(("queue", "prefill", "decode"), borders, borders[1:], strict=False):
        if start_s is not None:
            end_s = stats.ended_s if next_s is None else next_s
            moments = tuple(("preempted", moment) for moment in stats.preempted_s if start_s <= moment < end_s)
            yield Span(name, start_s, end_s, moments=moments)


# Sends spans to an OpenTelemetry collector (OTLP over HTTP), from a separate thread: a slow or unreachable collector loses
# spans, but never delays a request.


EXPORT_TIMEOUT_S: Final = 10.0
CLOSE_S: Final = 2.0
"""Timeout for sending the last spans at shutdown."""
DELAY_S: Final = 2.0
MAX_WAITING: Final = 4096
"""Maximum number of queued spans; further ones are dropped."""
_PATH: Final = "/v1/traces"
_PARTS: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Of OpenTelemetry; other packages install its API alone."""


class Tracer:
    """Creates spans of finished calls.

    Args:
        endpoint: of the collector, such as http://localhost:4318.
        model_name: the model's name for clients.
        delay_s: how long spans are batched before they are sent.

    Raises:
        ConfigError: the endpoint is not a URL, or the extra `otel` is not installed.
    """

    def __init__(self, endpoint: str, model_name: str, *, delay_s: float = DELAY_S) -> None:
        self._model_name = model_name
        self._provider = _provide(_address(endpoint), delay_s)
        self._tracer = self._provider.get_tracer("cloister", cloister.__version__)

    def write(self, call: HttpCall) -> None:
        """Queues the spans of one call; never blocks."""
        spans = spans_of(call, self._model_name)
        if spans:
            self._emit(spans, parse_traceparent(call.traceparent))

    def close(self) -> None:
        """Sends queued spans, within a short timeout."""
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
    """Returns the tracer from the settings, if enabled.

    Args:
        model_name: the model's own name, used if clients have no other.

    Raises:
        ConfigError: it cannot be created.
    """
    if config.otlp_endpoint is None:
        return None
    return Tracer(config.otlp_endpoint, next(iter(config.served_names), model_name))


def check_endpoint(endpoint: str) -> None:
    """Checks what can be known of a collector's address without asking it.

    Raises:
        ConfigError: it is no address, or OpenTelemetry is not installed.
    """
    _address(endpoint)
    try:
        lacks = any(importlib.util.find_spec(name) is None for name in _PARTS)
    except ModuleNotFoundError:  # not even the package above it
        lacks = True
    if lacks:
        raise _lacks_extra()


def _lacks_extra() -> ConfigError:
    return ConfigError(f"otlp_endpoint needs OpenTelemetry; install it with: {install_command('otel')}", param="otlp_endpoint")


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
        raise _lacks_extra() from None
    # An unreachable collector is reported once per failed batch; the transport's own logging would repeat it.
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
