"""Every figure, from the engine's events (rule 7) and the statuses of replies. Names end as those of vLLM do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cloister.server.metrics.drafts import Drafts
from cloister.server.metrics.histogram import Histogram
from cloister.server.metrics.lives import Lives
from cloister.types.events import Ended, Event, Preempted, Progressed, Scheduled, Stepped
from cloister.types.request import FinishReason

_QUEUE_S: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FIRST_TOKEN_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 600)
_BETWEEN_TOKENS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_WHOLE_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600)
_STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 10)
_NUM_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

_COUNTERS: Final = {
    "prompt_tokens": "Prompt tokens of requests that were scheduled.",
    "generation_tokens": "Output tokens.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens read from the prefix cache.",
    "num_preemptions": "Sequences that lost their blocks and wait again.",
}


class Metrics:
    """Collects figures in plain numbers, and makes families of them only when they are asked for.

    Args:
        others: whatever else has figures to show.

    Attributes:
        before_change: called before an event is taken, but for tokens: there are too many of them.
    """

    def __init__(self, *others: Collector) -> None:
        self._others = others
        self.before_change: Callable[[], None] = _nothing
        self._lives = Lives()
        self._drafts = Drafts()
        self._sums = dict.fromkeys(_COUNTERS, 0)
        self._ended: Counter[tuple[str, ...]] = Counter({(reason.value,): 0 for reason in FinishReason})
        self._replies: Counter[tuple[str, ...]] = Counter()
        self._blocks: dict[str, int] = {}  # by state; not known before the first step
        self._queue = Histogram("cloister_request_queue_time_seconds", "Arrival to first slot.", _QUEUE_S)
        self._ttft = Histogram("cloister_time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S)
        self._gaps = Histogram("cloister_inter_token_latency_seconds", "Time per token after the first.", _BETWEEN_TOKENS_S)
        self._whole = Histogram("cloister_e2e_request_latency_seconds", "Arrival to last token of a sequence.", _WHOLE_S)
        self._prefill = Histogram("cloister_request_prefill_time_seconds", "First slot to first token.", _WHOLE_S)
        self._decode = Histogram("cloister_request_decode_time_seconds", "First token to last token.", _WHOLE_S)
        self._prompts = Histogram("cloister_request_prompt_tokens", "Prompt tokens of a request.", _NUM_TOKENS)
        self._answers = Histogram("cloister_request_generation_tokens", "Output tokens of a sequence.", _NUM_TOKENS)
        self._step_s = Histogram("cloister_step_time_seconds", "Time of one step of the engine.", _STEP_S)
        self._step_tokens = Histogram("cloister_step_tokens", "Positions computed by one step.", _NUM_TOKENS)

    def observe(self, event: Event) -> None:
        """Takes one event of the engine."""
        match event:
            case Progressed():
                self._sums["generation_tokens"] += event.num_tokens
                key = (event.request_id, event.index)
                before = self._lives.last_token_s.get(key)
                self._lives.last_token_s[key] = event.now_s
                if before is not None and event.num_tokens:  # tokens that one step gives together share its time
                    self._gaps.observe((event.now_s - before) / event.num_tokens, event.num_tokens)
                return
            case _:
                self.before_change()
        match event:
            case Scheduled(resumed=False):
                self._observe_start(event)
            case Preempted():
                self._sums["num_preemptions"] += 1
            case Ended():
                self._observe_end(event)
            case Stepped():
                self._observe_step(event)
            case _:
                pass
        self._lives.follow(event)

    def count_reply(self, route: str, status: int) -> None:
        """Takes the outcome of one HTTP request."""
        self._replies[route, str(status)] += 1

    def render(self) -> bytes:
        """Returns every figure as Prometheus reads it."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yields every family."""
        yield _gauge("num_requests_running", "Requests that have KV blocks.", len(self._lives.running))
        yield _gauge("num_requests_waiting", "Requests that wait for their first slot, or again.", len(self._lives.waiting))
        used = self._blocks["used"] / sum(self._blocks.values()) if self._blocks else 0.0
        yield _gauge("kv_cache_usage_perc", "Used part of the KV blocks, 1 is full.", used)
        yield self._kv_blocks()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"cloister_{name}", text, value=self._sums[name])
        yield _counters("request_success", "Sequences that ended, by reason.", ("finished_reason",), self._ended)
        yield _counters("http_replies", "HTTP replies, by route and status.", ("route", "status"), self._replies)
        for histogram in (self._queue, self._ttft, self._gaps, self._whole, self._prefill, self._decode):
            yield histogram.family()
        for histogram in (self._prompts, self._answers, self._step_s, self._step_tokens):
            yield histogram.family()
        yield from self._drafts.collect()
        for other in self._others:
            yield from other.collect()

    def _observe_start(self, event: Scheduled) -> None:
        self._sums["prompt_tokens"] += event.num_prompt_tokens
        self._sums["prefix_cache_queries"] += event.num_queried_tokens
        self._sums["prefix_cache_hits"] += event.num_cached_tokens
        self._queue.observe(event.queue_s)
        self._prompts.observe(event.num_prompt_tokens)

    def _observe_end(self, event: Ended) -> None:
        self._ended[event.reason.value,] += 1
        if event.first_token_s is None:
            return
        self._ttft.observe(event.first_token_s - event.arrival_s)
        self._whole.observe(event.now_s - event.arrival_s)
        self._decode.observe(event.now_s - event.first_token_s)
        self._answers.observe(event.num_output_tokens)
        scheduled_s = self._lives.scheduled_s.get(event.request_id)
        if scheduled_s is not None:
            self._prefill.observe(event.first_token_s - scheduled_s)

    def _observe_step(self, event: Stepped) -> None:
        self._drafts.observe(event)
        self._step_s.observe(event.elapsed_s)
        self._step_tokens.observe(event.num_tokens)
        used, cached = event.num_used_blocks, event.num_cached_blocks
        self._blocks = {"used": used, "cached": cached, "free": event.num_total_blocks - used - cached}

    def _kv_blocks(self) -> Metric:
        family = GaugeMetricFamily("cloister_kv_blocks", "KV blocks, by what they hold.", labels=("state",))
        for state, count in self._blocks.items():
            family.add_metric((state,), count)
        return family


def _nothing() -> None:
    """Nobody wants to know."""


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"cloister_{name}", text, value=value)


def _counters(name: str, text: str, labels: tuple[str, ...], counts: Counter[tuple[str, ...]]) -> Metric:
    family = CounterMetricFamily(f"cloister_{name}", text, labels=labels)
    for key, count in sorted(counts.items()):
        family.add_metric(key, count)
    return family
