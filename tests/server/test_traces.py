"""Traces: what the events say as spans, under the client's own trace, with no content, and never in a request's way."""

from __future__ import annotations

import builtins
import gzip
import importlib.util
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cloister.engine.in_flight import EngineStats
from cloister.launch import resolve_settings
from cloister.launch.serving import serve
from cloister.policy import Policy, apply_profile_to_front
from cloister.server import traces
from cloister.server.calls import HttpCall
from cloister.server.traces import ALLOWED, Parent, Span, Tracer, parse_traceparent, spans_of
from cloister.types.config import ServerConfig, resolve
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.refusals import Refusals
from tests.server.running_server import MODEL, serving, start_slow, start_speaking
from tests.server.test_bad_input import SECRET
from tests.serving import free_port

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP receiver: keeps every span, and answers as it is told to; what it still delays is answered when it closes."""

    def __init__(self, status: int = 200, delay_s: float = 0.0) -> None:
        self.bodies: list[bytes] = []
        self._closing = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
                assert self.path == "/v1/traces"
                collector._closing.wait(delay_s)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [s for request in requests for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]

    def wait(self, num_spans: int) -> list:
        deadline = time.monotonic() + 300
        while len(spans := self.spans()) < num_spans:
            assert time.monotonic() < deadline, f"{len(spans)} spans came"
            time.sleep(0.02)
        return spans


@contextmanager
def collecting(**options):
    collector = Collector(**options)
    try:
        yield collector
    finally:
        collector.close()


@contextmanager
def traced(model_path, endpoint: str, start=start_speaking):
    tracer = Tracer(endpoint, "org/served", delay_s=0.05)
    try:
        with (
            serving(model_path, lambda: start(model_path), listeners=[tracer.write]) as server,
            httpx.Client(base_url=server.url, timeout=300) as client,
        ):
            yield client
    finally:
        tracer.close()


def values(span) -> dict[str, object]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def complete(client: httpx.Client, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={"model": MODEL, "prompt": "four", "max_tokens": 3, **fields}, headers=headers)


def test_a_request_is_a_span_with_its_phases_inside_and_its_counts_on_it(model_path):
    with collecting() as collector, traced(model_path, collector.url) as client:
        reply = complete(client)
        spans = {span.name: span for span in collector.wait(4)}
    whole = spans.pop("POST /v1/completions")
    assert set(spans) == {"queue", "prefill", "decode"}
    assert values(whole) | {
        "cloister.request_id": reply.headers["x-request-id"],
        "cloister.num_prompts": 1,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "cloister",
        "gen_ai.request.model": "org/served",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 3,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
    } == values(whole)
    assert whole.parent_span_id == b""
    for span in spans.values():
        assert (span.trace_id, span.parent_span_id) == (whole.trace_id, whole.span_id)
        assert not span.attributes
    order = [whole.start_time_unix_nano, spans["queue"].start_time_unix_nano, spans["queue"].end_time_unix_nano]
    order += [spans["prefill"].end_time_unix_nano, spans["decode"].end_time_unix_nano, whole.end_time_unix_nano]
    assert order == sorted(order)
    assert abs(whole.start_time_unix_nano / 1e9 - time.time()) < 60
    assert spans["decode"].start_time_unix_nano == spans["prefill"].end_time_unix_nano


def test_a_request_joins_the_trace_of_its_client_unless_that_is_not_sampled(model_path):
    with collecting() as collector, traced(model_path, collector.url) as client:
        complete(client, {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"})
        complete(client, {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": f"a={SECRET}", "baggage": f"b={SECRET}"})
        spans = collector.wait(4)
        time.sleep(0.2)
        assert len(collector.spans()) == 4
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    (whole,) = (span for span in spans if span.name.startswith("POST"))
    assert whole.parent_span_id.hex() == SPAN_ID


def test_what_a_client_sends_is_in_no_span(model_path):
    marked = {
        "x-marker": SECRET,
        "user-agent": SECRET,
        "tracestate": f"a={SECRET}",
        "baggage": f"b={SECRET}",
        "traceparent": SECRET,
    }
    with collecting() as collector, traced(model_path, collector.url) as client:
        client.headers.update(marked)
        for fields in ({}, {"stream": True}, {"user": SECRET}, {"stop": SECRET}, {"model": SECRET}, {SECRET: 1}):
            complete(client, prompt=SECRET, **fields)
        client.get(f"/{SECRET}?{SECRET}")
        client.request(SECRET, "/v1/models")
        spans = collector.wait(5 * 4 + 3)
        assert SECRET.encode() not in b"".join(collector.bodies)
    assert {attribute.key for span in spans for attribute in span.attributes} <= ALLOWED
    assert {span.name for span in spans} == {
        "POST /v1/completions", "GET none", "other /v1/models", "queue", "prefill", "decode",
    }  # fmt: skip


def test_health_and_metrics_make_no_spans(model_path):
    with collecting() as collector, traced(model_path, collector.url) as client:
        client.get("/health")
        client.get("/metrics")
        client.get("/v1/models")
        assert [span.name for span in collector.wait(1)] == ["GET /v1/models"]


def test_a_client_that_left_has_its_spans_too(model_path):
    with collecting() as collector, traced(model_path, collector.url, start_slow) as client:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
        spans = {span.name: span for span in collector.wait(4)}
    whole = spans["POST /v1/completions"]
    assert values(whole)["gen_ai.response.finish_reasons"] == ["abort"]
    assert spans["decode"].end_time_unix_nano <= whole.end_time_unix_nano


@pytest.mark.parametrize("kind", ["gone", "slow", "failing"])
def test_a_collector_that_does_not_work_costs_no_request_and_little_time(model_path, kind, monkeypatch):
    monkeypatch.setattr(traces, "EXPORT_TIMEOUT_S", 1.0)
    with collecting(status=500 if kind == "failing" else 200, delay_s=120.0 if kind == "slow" else 0.0) as collector:
        url = f"http://127.0.0.1:{free_port()}" if kind == "gone" else collector.url
        tracer = Tracer(url, "m", delay_s=0.02)
        with (
            serving(model_path, lambda: start_speaking(model_path), listeners=[tracer.write]) as server,
            httpx.Client(base_url=server.url, timeout=300) as client,
        ):
            begun = time.monotonic()
            for _ in range(30):
                assert complete(client).status_code == 200
                time.sleep(0.005)
        tracer.close()
        assert time.monotonic() - begun < 60  # half of what the slow one takes for a single answer
    # The exporter still tries, and writes a line for each failure, which other tests in this process would read.
    for thread in threading.enumerate():
        if thread.name == "last spans":
            thread.join(300)
            assert not thread.is_alive()


def resolve_front(profile, config):
    with Refusals() as refusals:
        return apply_profile_to_front(Policy(profile), config, refusals)


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_strict_profile_refuses_traces_and_request_lines(profile):
    for setting, value in (("otlp_endpoint", "http://localhost:4318"), ("log_requests", True)):
        config = resolve(ServerConfig, [("flag", {setting: value})])
        with pytest.raises(PolicyError, match=rf"T6\.profiling\.\w+(-log)?\.{profile}.*`{setting}` \(flag\)"):
            resolve_front(profile, config)
    assert resolve_front(profile, resolve(ServerConfig, [])).config.log_requests is False
    assert resolve_front("team", resolve(ServerConfig, [])).config.log_requests is True


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", "http://host/?a=1"])
def test_what_is_no_address_is_refused_with_an_example(endpoint):
    with pytest.raises(ConfigError, match="such as http://localhost:4318"):
        Tracer(endpoint, "m")


def test_without_the_extra_the_message_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def without(name: str, *more: object, **others: object) -> object:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'cloister\[otel\]'"):
        Tracer("http://localhost:4318", "m")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE_ID}-{SPAN_ID}-01", Parent(int(TRACE_ID, 16), int(SPAN_ID, 16), True)),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", Parent(int(TRACE_ID, 16), int(SPAN_ID, 16), False)),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-of-a-later-version", Parent(int(TRACE_ID, 16), int(SPAN_ID, 16), True)),
        (f"00-{TRACE_ID}-{SPAN_ID}-01-more", None),
        (f"ff-{TRACE_ID}-{SPAN_ID}-01", None),
        (f"00-{'0' * 32}-{SPAN_ID}-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (f"00-{TRACE_ID.upper()}-{SPAN_ID}-01", None),
        (f"00-{TRACE_ID}-{SPAN_ID}", None),
        ("", None),
    ],
)
def test_traceparents_are_read_as_the_standard_says(header, expected):
    assert parse_traceparent(header.encode()) == expected


def test_a_preemption_is_a_moment_of_the_phase_that_it_fell_into():
    work = EngineStats(4, 0, 3, arrival_s=1.0, scheduled_s=2.0, first_token_s=3.0, ended_s=9.0, preempted_s=[2.5, 5.0, 6.0])
    call = HttpCall("POST", None, None, 0.5, route="/v1/completions", status=200, ended_s=9.5, engine_stats={"r": work})
    phases = {span.name: span for span in spans_of(call, "m")[1:]}
    assert {name: len(span.moments) for name, span in phases.items()} == {"queue": 0, "prefill": 1, "decode": 2}
    work.first_token_s = None
    phases = {span.name: span for span in spans_of(call, "m")[1:]}
    assert set(phases) == {"queue", "prefill"}
    assert (phases["prefill"].start_s, phases["prefill"].end_s, len(phases["prefill"].moments)) == (2.0, 9.0, 3)


def test_an_attribute_that_is_not_on_the_list_cannot_be_made():
    with pytest.raises(AssertionError):
        Span("x", 0.0, 1.0, attributes={"gen_ai.input.messages": SECRET})


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("localhost:4318", r"must be an address such as http://localhost:4318"),
        ("http://localhost:4318", r"install it with: .* -m pip"),
    ],
)
def test_a_collector_that_cannot_be_used_is_said_before_a_model_is_loaded(endpoint, said, monkeypatch):
    monkeypatch.setattr("cloister.server.traces.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("cloister.launch.serving.open_plain", lambda *arguments: pytest.fail("the model is loaded"))
    with pytest.raises(ConfigError, match=said):
        serve(resolve_settings({"model": "cloister-5m", "otlp_endpoint": endpoint}))


def test_the_api_of_opentelemetry_alone_does_not_suffice(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "cloister.server.traces.importlib.util.find_spec", lambda name: None if name == "opentelemetry.sdk" else find(name)
    )
    with pytest.raises(ConfigError, match=r"install it with: .* -m pip"):
        traces.check_endpoint("http://localhost:4318")


def test_a_collector_that_can_be_used_is_not_refused():
    traces.check_endpoint("http://localhost:4318")
