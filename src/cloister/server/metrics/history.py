"""The metrics of the last hour per minute and of the last day per ten minutes, for pages opened later.

Numbers only, sums over all users, in memory only. No I/O except that of the collector; the clock is an argument.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
from prometheus_client.metrics_core import Metric

from cloister.server.metrics.event_metrics import Metrics
from cloister.types.events import Event

PERIOD_S: Final = 60.0
NUM_FINE: Final = 60
COARSE_EVERY: Final = 10
NUM_COARSE: Final = 144
_LEFT_OUT: Final = frozenset({"route", "drafter"})
"""Labels that are summed over: the board does not distinguish them."""
_KEPT: Final = frozenset(
    f"cloister_{name}"
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "request_success",
        "http_replies",
        "request_queue_time_seconds",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "process_cpu_seconds",
        "process_memory_bytes",
    )
)
_NONE: Final = float("nan")


class PastReading(msgspec.Struct, frozen=True):
    """Past values.

    Attributes:
        age_s: age in seconds.
        values: one for each series of the report; None if the series did not exist yet.
    """

    age_s: float
    values: list[float | None]


class MetricsReport(msgspec.Struct, frozen=True):
    """Reply of /metrics/history.

    Attributes:
        series: names with labels, as in `/metrics`.
        readings: oldest first.
    """

    series: list[str]
    readings: list[PastReading]


class RecordedMetrics:
    """Metrics that also record their history.

    Values change only on events, so each event first closes the periods that have ended: this needs no timer, and covers
    periods without events. Token events are skipped to keep them cheap: tokens of the step in which a period ends count for
    that period.

    Args:
        metrics: the metrics to record.
        clock: seconds, never set back.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        metrics.before_change = self._close_periods
        self._clock = clock
        self._began_s = clock()
        self._num_closed = 0
        self._places: dict[str, int] = {}
        """Series -> index in a reading. Series depend on this server's routes, statuses and processes, never on a request."""
        self._fine: deque[tuple[int, array[float]]] = deque(maxlen=NUM_FINE)
        self._coarse: deque[tuple[int, array[float]]] = deque(maxlen=NUM_COARSE)

    @property
    def observe(self) -> Callable[[Event], None]:
        """Records one event of the engine; bound directly to the metrics to avoid a call for each token."""
        return self._metrics.observe

    def count_reply(self, route: str, status: int) -> None:
        """Records the outcome of one HTTP request."""
        self._close_periods()
        self._metrics.count_reply(route, status)

    def count_unread(self) -> None:
        """Records that a reply was ended because its client did not read it."""
        self._close_periods()
        self._metrics.count_unread()

    def render(self, *, for_operator: bool = True) -> bytes:
        """Returns all current metrics in the Prometheus text format, as `Exposition.render`."""
        self._close_periods()
        return self._metrics.render(for_operator=for_operator)

    def report(self) -> MetricsReport:
        """Returns the stored readings."""
        self._close_periods()
        now_s = self._clock() - self._began_s
        oldest_fine = self._fine[0][0] if self._fine else 0
        kept = [*(reading for reading in self._coarse if reading[0] < oldest_fine), *self._fine]
        return MetricsReport(
            list(self._places),
            [PastReading(round(now_s - number * PERIOD_S, 3), self._fill(values)) for number, values in kept],
        )

    def _close_periods(self) -> None:
        num_over = int((self._clock() - self._began_s) / PERIOD_S)
        if num_over == self._num_closed:
            return
        values = self._read()
        # Nothing has happened since the first of these periods ended, so all get the same values.
        for number in range(max(self._num_closed + 1, num_over - NUM_COARSE * COARSE_EVERY), num_over + 1):
            self._fine.append((number, values))
            if number % COARSE_EVERY == 0:
                self._coarse.append((number, values))
        self._num_closed = num_over

    def _read(self) -> array[float]:
        found = _sum_series(self._metrics.collect())
        for name in found:
            self._places.setdefault(name, len(self._places))
        return array("d", (found.get(name, _NONE) for name in self._places))

    def _fill(self, values: array[float]) -> list[float | None]:
        known = [None if value != value else value for value in values]  # NaN is the one number that is not itself
        return [*known, *[None] * (len(self._places) - len(known))]


def _sum_series(families: Iterable[Metric]) -> dict[str, float]:
    """The recorded values, by name with labels, without sums of histograms."""
    found: defaultdict[str, float] = defaultdict(float)
    for family in families:
        if family.name not in _KEPT:
            continue
        for sample in family.samples:
            if sample.name.endswith(("_sum", "_count")):
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items() if name not in _LEFT_OUT)
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] += sample.value
    return found
