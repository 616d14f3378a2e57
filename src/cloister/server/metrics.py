"""Figures for Prometheus, from the engine's events (rule 7) and the statuses of replies. No label comes from a request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from cloister.privacy.counts import CountRelease
from cloister.types.events import Arrived, Ended, Event, Preempted, Progressed, Scheduled, Stepped

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_QUEUE_S: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FIRST_TOKEN_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 600)
_BETWEEN_TOKENS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_WHOLE_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600)


class Exposition(Protocol):
    """What stands behind `/metrics`."""

    def observe(self, event: Event) -> None:
        """Takes one event of the engine."""
        ...

    def count_reply(self, route: str, status: int) -> None:
        """Takes the outcome of one HTTP request; `route` is the template, never the path."""
        ...

    def render(self) -> bytes:
        """Returns the text that Prometheus reads."""
        ...


class Lives:
    """Requests between their first and last event."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.last_token_s: dict[tuple[str, int], float] = {}

    def follow(self, event: Event) -> None:
        """Moves a request to where the event says it is."""
        match event:
            case Arrived(request_id=request_id) | Preempted(request_id=request_id):
                self.running.discard(request_id)
                self.waiting.add(request_id)
            case Scheduled(request_id=request_id):
                self.waiting.discard(request_id)
                self.running.add(request_id)
            case Ended(request_id=request_id, index=index, last=last):
                self.last_token_s.pop((request_id, index), None)
                if last:
                    self.waiting.discard(request_id)
                    self.running.discard(request_id)
            case _:
                pass


class Gaps(Collector):
    """A histogram that takes equal values at once and costs next to nothing: it is told of every token.

    Args:
        bounds: upper bounds of its buckets, rising; one more takes what is above.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """Takes `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yields the histogram, with buckets that count everything up to their bound."""
        names = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """Every figure, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lives = Lives()
        self._num_new_tokens = 0
        self._running = self._gauge("num_requests_running", "Requests that have KV blocks.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for their first slot, or again.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Used part of the KV blocks, 1 is full.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were scheduled.")
        self._output_tokens = self._counter("generation_tokens", "Output tokens.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens read from the prefix cache.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Sequences that lost their blocks and wait again.")
        self._ended = self._counter("request_success", "Sequences that ended, by reason.", "finished_reason")
        self._replies = self._counter("http_replies", "HTTP replies, by route and status.", "route", "status")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S)
        self._gaps = Gaps("cloister_inter_token_latency_seconds", "Time per token after the first.", _BETWEEN_TOKENS_S)
        self._registry.register(self._gaps)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first slot.", _QUEUE_S)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token of a sequence.", _WHOLE_S)

    def observe(self, event: Event) -> None:
        """Takes one event of the engine."""
        match event:
            case Progressed():
                self._observe_tokens(event)
                return
            case Scheduled(resumed=False):
                self._prompt_tokens.inc(event.num_prompt_tokens)
                self._queries.inc(event.num_prompt_tokens)
                self._hits.inc(event.num_cached_tokens)
                self._queue.observe(event.queue_s)
            case Preempted():
                self._preemptions.inc()
            case Ended():
                self._observe_end(event)
            case Stepped():
                self._kv_usage.set(event.num_used_blocks / max(1, event.num_total_blocks))
            case _:
                pass
        self._lives.follow(event)

    def count_reply(self, route: str, status: int) -> None:
        """Takes the outcome of one HTTP request."""
        self._replies.labels(route, str(status)).inc()

    def render(self) -> bytes:
        """Returns every figure as Prometheus reads it. What changes with every token is put there only now."""
        self._output_tokens.inc(self._num_new_tokens)
        self._num_new_tokens = 0
        self._running.set(len(self._lives.running))
        self._waiting.set(len(self._lives.waiting))
        return generate_latest(self._registry)

    def _observe_tokens(self, event: Progressed) -> None:
        self._num_new_tokens += event.num_tokens
        key = (event.request_id, event.index)
        before = self._lives.last_token_s.get(key)
        self._lives.last_token_s[key] = event.now_s
        if before is not None and event.num_tokens:  # tokens that one step gives together share its time
            self._gaps.observe((event.now_s - before) / event.num_tokens, event.num_tokens)

    def _observe_end(self, event: Ended) -> None:
        self._ended.labels(event.reason.value).inc()
        if event.first_token_s is not None:
            self._ttft.observe(event.first_token_s - event.arrival_s)
            self._whole.observe(event.now_s - event.arrival_s)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"cloister_{name}", text, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cloister_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"cloister_{name}", text, buckets=buckets, registry=self._registry)


class ReleasedCounts:
    """The few sums that a strict profile lets out, and those only after a threshold of requests."""

    def __init__(self, release: CountRelease) -> None:
        self._release = release
        self._num_ended = 0
        self._counts = dict.fromkeys(("requests", "prompt_tokens", "output_tokens", "steps", "preemptions"), 0)

    def observe(self, event: Event) -> None:
        """Takes one event of the engine."""
        match event:
            case Ended(last=last):
                self._counts["prompt_tokens"] += event.num_prompt_tokens if last else 0
                self._counts["output_tokens"] += event.num_output_tokens
                self._counts["requests"] += last
                self._num_ended += last
            case Preempted():
                self._counts["preemptions"] += 1
            case Stepped():
                self._counts["steps"] += 1
            case _:
                pass

    def count_reply(self, route: str, status: int) -> None:
        """Keeps nothing: refusals are not among the counts that may leave."""

    def render(self) -> bytes:
        """Returns the sums as they were last released."""
        shown = self._release.publish(self._num_ended, self._counts)
        lines = [f"# TYPE cloister_{name}_total counter\ncloister_{name}_total {value}" for name, value in shown.items()]
        return "".join(f"{line}\n" for line in lines).encode()
