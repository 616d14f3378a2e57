"""All metrics, from the engine's events (the source of all metrics) and reply statuses. Names follow vLLM's."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cloister.types.events import (
    Arrived,
    Ended,
    Event,
    KVLoaded,
    KVStored,
    Lost,
    Migrated,
    Preempted,
    PrefixTaken,
    Progressed,
    Scheduled,
    Stepped,
)
from cloister.types.request import FinishReason

# A cheap histogram that adds equal values at once, and has no `_created` series.


class Histogram:
    """Counts values by the smallest bound that they do not exceed.

    Args:
        bounds: upper bounds of its buckets, increasing; one more bucket counts larger values.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self) -> HistogramMetricFamily:
        """Returns it in Prometheus format, with cumulative buckets."""
        names = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


# Speculation metrics: drafted and accepted tokens, and time. Names follow vLLM's.


class DraftTotals:
    """Sums over all requests."""

    def __init__(self) -> None:
        self._num_drafts: Counter[str] = Counter()
        self._drafted: Counter[tuple[str, int]] = Counter()
        self._accepted: Counter[tuple[str, int]] = Counter()
        self._draft_s: dict[str, float] = {}
        self._gained_s = 0.0
        self._spent_s = 0.0
        self._shown_s = 0.0
        """Running maximum of the time spent: a counter must not fall, but a step may be faster than predicted."""

    def observe(self, event: Stepped) -> None:
        """Records one step."""
        self._gained_s += event.gained_s
        self._spent_s += event.spent_s
        self._shown_s = max(self._shown_s, self._spent_s)
        for part in event.drafting:
            name = part.drafter
            self._num_drafts[name] += part.num_drafts
            self._draft_s[name] = self._draft_s.get(name, 0.0) + part.draft_s
            for place, count in enumerate(part.drafted):
                self._drafted[name, place] += count
            for place, count in enumerate(part.accepted):
                self._accepted[name, place] += count

    def collect(self) -> Iterator[Metric]:
        """Yields the counters; those by drafter are empty until there are drafts."""
        names = sorted(self._num_drafts)
        drafted, accepted = ({n: _sum_of(counts, n) for n in names} for counts in (self._drafted, self._accepted))
        yield _by_drafter("num_drafts", "Drafts that were verified, one a sequence and step.", self._num_drafts)
        yield _by_drafter("num_draft_tokens", "Tokens that were drafted and verified.", drafted)
        yield _by_drafter("num_accepted_tokens", "Tokens that were drafted and accepted.", accepted)
        yield _by_place("num_draft_tokens_per_pos", "Tokens drafted, by their place in the draft.", self._drafted)
        yield _by_place("num_accepted_tokens_per_pos", "Tokens accepted, by their place in the draft.", {
            key: self._accepted[key] for key in self._drafted
        })  # fmt: skip
        yield _by_drafter("draft_seconds", "Time that drafters took.", self._draft_s)
        for name, text, value in (
            ("gained_seconds", "Predicted time of the steps that accepted drafts made needless.", self._gained_s),
            ("spent_seconds", "Time of steps beyond what is predicted of them without drafts.", self._shown_s),
        ):
            yield CounterMetricFamily(f"cloister_spec_decode_{name}", text, value=value)


def _sum_of(counts: Counter[tuple[str, int]], drafter: str) -> int:
    return sum(count for (name, _), count in counts.items() if name == drafter)


def _by_drafter(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"cloister_spec_decode_{name}", text, labels=("drafter",))
    for drafter, value in sorted(values.items()):
        family.add_metric((drafter,), value)
    return family


def _by_place(name: str, text: str, values: Mapping[tuple[str, int], int]) -> Metric:
    family = CounterMetricFamily(f"cloister_spec_decode_{name}", text, labels=("drafter", "position"))
    for (drafter, place), value in sorted(values.items()):
        family.add_metric((drafter, str(place)), value)
    return family


# KV that came from another engine or a tier, and what tiers keep.


class KVTierTotals:
    """Sums over all loads of KV, by where it came from: a tier, or `engine` for another engine (not the tier `peer`, which is
    memory of another one that this engine stores in)."""

    def __init__(self) -> None:
        self._loads: Counter[tuple[str, ...]] = Counter()
        self._bytes: Counter[tuple[str, ...]] = Counter()
        self._load_s: dict[str, float] = {}
        self._stored: Counter[tuple[str, ...]] = Counter()
        self._used: dict[str, int] = {}
        self._oldest_s: dict[str, float] = {}

    def note_load(self, event: KVLoaded) -> None:
        """Records one load that has ended."""
        tier = event.tier or "engine"
        self._loads[tier, "whole" if event.complete else "part"] += 1
        self._bytes[tier,] += event.num_bytes
        self._load_s[tier] = self._load_s.get(tier, 0.0) + event.elapsed_s

    def note_stored(self, stored: KVStored) -> None:
        """Records what a tier has written and holds."""
        self._stored[stored.tier,] += stored.num_bytes
        self._used[stored.tier] = stored.used_bytes
        self._oldest_s[stored.tier] = stored.oldest_s or 0.0

    def collect(self) -> Iterator[Metric]:
        """Yields the families, which are empty until something was stored or loaded."""
        yield _counters("kv_loads", "Loads of KV that ended, by tier: whole, or part and the rest computed.",
                        ("tier", "result"), self._loads)  # fmt: skip
        yield _counters("kv_loaded_bytes", "KV that was loaded, by tier.", ("tier",), self._bytes)
        seconds = CounterMetricFamily("cloister_kv_load_seconds", "Time that requests waited for loads.", labels=("tier",))
        for tier, value in sorted(self._load_s.items()):
            seconds.add_metric((tier,), value)
        yield seconds
        yield _counters("kv_stored_bytes", "KV that a tier has written.", ("tier",), self._stored)
        used = GaugeMetricFamily(f"{TIER_PREFIX}used_bytes", "What a tier holds.", labels=("tier",))
        oldest = GaugeMetricFamily(
            f"{TIER_PREFIX}oldest_seconds", "Age of its oldest block at its last change.", labels=("tier",)
        )
        for family, values in ((used, self._used), (oldest, self._oldest_s)):
            for tier, value in sorted(values.items()):
                family.add_metric((tier,), value)
            yield family


_QUEUE_S: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FIRST_TOKEN_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 600)
_BETWEEN_TOKENS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_WHOLE_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600)
_STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 10)
_NUM_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

REPLICA_PREFIX: Final = "cloister_replica_"
"""Prefix of metrics of single replicas."""
TIER_PREFIX: Final = "cloister_kv_tier_"
"""Prefix of metrics of what tiers hold, which is all tenants' (a client sees its own with `GET /v1/cache`)."""
_COUNTERS: Final = {
    "prompt_tokens": "Prompt tokens of requests that were scheduled.",
    "generation_tokens": "Output tokens.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens read from the prefix cache.",
    "num_preemptions": "Sequences that lost their blocks and wait again.",
    "num_resumes": "Requests that lost their engine and wait for the next one.",
    "num_migrations": "Requests that left their engine for another one while they ran.",
}


class LiveRequests:
    """State of requests until they end.

    Attributes:
        waiting, running: ids of requests.
        last_token_s: (id, index of the sequence) -> time of its last tokens.
        scheduled_s: id -> time of its first slot.
    """

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.last_token_s: dict[tuple[str, int], float] = {}
        self.scheduled_s: dict[str, float] = {}

    def follow(self, event: Event) -> None:
        """Updates the state of a request from an event."""
        match event:
            case Arrived() | Preempted() | Lost() | Migrated():
                request_id = event.request_id
                self.running.discard(request_id)
                self.waiting.add(request_id)
            case Scheduled(request_id=request_id, now_s=now_s):
                self.waiting.discard(request_id)
                self.running.add(request_id)
                self.scheduled_s.setdefault(request_id, now_s)
            case Ended(request_id=request_id, index=index, last=last):
                self.last_token_s.pop((request_id, index), None)
                if last:
                    self._forget(request_id)
            case _:
                pass

    def _forget(self, request_id: str) -> None:
        self.waiting.discard(request_id)
        self.running.discard(request_id)
        self.scheduled_s.pop(request_id, None)


class _ForUsers:
    """Metrics without those of single replicas, which show where requests run (as `GET /v1/replicas` does to operators), and
    without what tiers hold, which shows what others did."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yields the families."""
        return (family for family in self._metrics.collect() if not family.name.startswith((REPLICA_PREFIX, TIER_PREFIX)))


class Metrics:
    """Collects plain numbers, and builds metric families only on demand.

    Args:
        others: further collectors.

    Attributes:
        before_change: called before an event is recorded, except for token events, which are too frequent.
    """

    def __init__(self, *others: Collector) -> None:
        self._others = others
        self.before_change: Callable[[], None] = _nothing
        self._lives = LiveRequests()
        self._drafts = DraftTotals()
        self._tiers = KVTierTotals()
        self._sums = dict.fromkeys(_COUNTERS, 0)
        self._ended: Counter[tuple[str, ...]] = Counter({(reason.value,): 0 for reason in FinishReason})
        self._replies: Counter[tuple[str, ...]] = Counter()
        self._num_unread = 0
        self._blocks: dict[str, int] = {}  # by state; unknown before the first step
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
        """Records one event of the engine."""
        match event:
            case Progressed():
                self._sums["generation_tokens"] += event.num_tokens
                key = (event.request_id, event.index)
                before = self._lives.last_token_s.get(key)
                self._lives.last_token_s[key] = event.now_s
                if before is not None and event.num_tokens:  # tokens of one step share its time
                    self._gaps.observe((event.now_s - before) / event.num_tokens, event.num_tokens)
                return
            case _:
                self.before_change()
        match event:
            case Scheduled(resumed=False):
                self._observe_start(event)
            case PrefixTaken():
                self._sums["prefix_cache_hits"] += event.num_tokens
            case Preempted():
                self._sums["num_preemptions"] += 1
            case Lost():
                self._sums["num_resumes"] += 1
            case Migrated():
                self._sums["num_migrations"] += 1
            case Ended():
                self._observe_end(event)
            case Stepped():
                self._observe_step(event)
            case KVLoaded():
                self._tiers.note_load(event)
            case _:
                pass
        self._lives.follow(event)

    def count_reply(self, route: str, status: int) -> None:
        """Records the outcome of one HTTP request."""
        self._replies[route, str(status)] += 1

    def count_unread(self) -> None:
        """Records that a reply was ended because its client did not read it."""
        self._num_unread += 1

    def render(self, *, for_operator: bool = True) -> bytes:
        """Returns all metrics in the Prometheus text format; those of single replicas for operators only."""
        return generate_latest(self if for_operator else _ForUsers(self))

    def collect(self) -> Iterator[Metric]:
        """Yields every family."""
        yield _gauge("num_requests_running", "Requests that have KV blocks.", len(self._lives.running))
        yield _gauge("num_requests_waiting", "Requests that wait for their first slot, or again.", len(self._lives.waiting))
        blocks = self._find_blocks()
        used = blocks["used"] / sum(blocks.values()) if blocks else 0.0
        yield _gauge("kv_cache_usage_perc", "Used part of the KV blocks, 1 is full.", used)
        family = GaugeMetricFamily("cloister_kv_blocks", "KV blocks, by what they hold.", labels=("state",))
        for state, count in blocks.items():
            family.add_metric((state,), count)
        yield family
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"cloister_{name}", text, value=self._sums[name])
        yield _counters("request_success", "Sequences that ended, by reason.", ("finished_reason",), self._ended)
        yield _counters("http_replies", "HTTP replies, by route and status.", ("route", "status"), self._replies)
        yield CounterMetricFamily(
            "cloister_unread_replies_ended", "Replies ended because their clients read too little.", value=self._num_unread
        )
        for histogram in (self._queue, self._ttft, self._gaps, self._whole, self._prefill, self._decode):
            yield histogram.family()
        for histogram in (self._prompts, self._answers, self._step_s, self._step_tokens):
            yield histogram.family()
        yield from self._drafts.collect()
        yield from self._tiers.collect()
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
        for stored in event.stored:
            self._tiers.note_stored(stored)
        self._step_s.observe(event.elapsed_s)
        self._step_tokens.observe(event.num_tokens)
        used, cached = event.num_used_blocks, event.num_cached_blocks
        self._blocks = {"used": used, "cached": cached, "free": event.num_total_blocks - used - cached}

    def _find_blocks(self) -> dict[str, int]:
        """Returns the blocks after the last step, by state. Without an open request none is in use, whatever that step saw:
        blocks that were freed after it, for example because a request moved to another engine, count as cached if that engine
        caches."""
        if not self._blocks or self._lives.running or self._lives.waiting:
            return self._blocks
        used, cached, free = self._blocks["used"], self._blocks["cached"], self._blocks["free"]
        return {"used": 0, "cached": cached + used, "free": free} if cached else {"used": 0, "cached": 0, "free": free + used}


def _nothing() -> None:
    """Does nothing."""


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"cloister_{name}", text, value=value)


def _counters(name: str, text: str, labels: tuple[str, ...], counts: Counter[tuple[str, ...]]) -> Metric:
    family = CounterMetricFamily(f"cloister_{name}", text, labels=labels)
    for key, count in sorted(counts.items()):
        family.add_metric(key, count)
    return family
