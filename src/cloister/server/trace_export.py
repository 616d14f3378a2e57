"""Sends spans to an OpenTelemetry collector (OTLP over HTTP), from a thread of its own: a collector that is slow or gone costs
spans, never a request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import cloister
from cloister.server.calls import HttpCall
from cloister.server.traces import Parent, Span, parse_traceparent, spans_of
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

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

    def write(self, call: HttpCall) -> None:
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
