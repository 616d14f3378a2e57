"""Metrics known without a request: model, memory budget, startup times, health, process usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

import cloister
from cloister.engine.machine import cpu_seconds, process_age_s, resident_bytes
from cloister.engine.request_client import RequestClient
from cloister.policy.counts import ALLOWED_COUNTS, CountRelease
from cloister.types.events import Ended, Event, Preempted, Stepped


class EngineGauges:
    """Gauges read from an engine on demand: a restarted engine may differ.

    Args:
        model_name: the model's name for clients.
    """

    def __init__(self, engine: RequestClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yields the families."""
        health = self._engine.health()
        yield GaugeMetricFamily("cloister_engine_healthy", "1 while steps advance or nothing waits.", value=float(health.good))
        yield GaugeMetricFamily(
            "cloister_engine_idle", "1 while no engine runs and the next request starts one.", value=float(health.is_idle)
        )
        yield from self._replicas()
        yield from self._lengths()
        yield self._model()
        yield _gauges("memory_budget_bytes", "Memory budget, by what it is for.", "part", self._engine.memory)
        yield _gauges("process_memory_bytes", "Memory that a process has in RAM.", "process", self._memory())
        yield self._cpu()
        yield GaugeMetricFamily("cloister_uptime_seconds", "Time since the server process was started.", value=process_age_s())
        yield _gauges("startup_seconds", "Time that the start took, by phase.", "phase", self._engine.startup)

    def _replicas(self) -> Iterator[Metric]:
        """Yields the restarts of each engine, and the load of each replica if there are several."""
        replicas = self._engine.snapshots()
        restarts = CounterMetricFamily(
            "cloister_replica_restarts", "Engines started in place of one that died or hung.", labels=("replica",)
        )
        for replica in replicas:
            restarts.add_metric((str(replica.index),), replica.num_restarts)
        yield restarts
        if len(replicas) < 2:
            return
        up = GaugeMetricFamily("cloister_replica_up", "1 while a replica accepts requests.", labels=("replica",))
        requests = GaugeMetricFamily("cloister_replica_requests", "Requests that a replica has.", labels=("replica",))
        waiting = GaugeMetricFamily("cloister_replica_waiting", "Those without a slot.", labels=("replica",))
        usage = GaugeMetricFamily("cloister_replica_kv_cache_usage_perc", "Used part of its KV blocks.", labels=("replica",))
        slowness = GaugeMetricFamily(
            "cloister_replica_slowness", "Its step times, relative to those of the others.", labels=("replica",)
        )
        mismatches = CounterMetricFamily(
            "cloister_replica_mismatches", "Answers that another replica computed differently.", labels=("replica",)
        )
        routed = CounterMetricFamily("cloister_replica_routed", "Requests that a replica was given.", labels=("replica",))
        moved = CounterMetricFamily(
            "cloister_replica_migrated", "Running requests that were moved to a replica.", labels=("replica",)
        )
        loads = CounterMetricFamily(
            "cloister_replica_kv_loads", "How often KV came to a replica from another one.", labels=("replica",)
        )
        copies = CounterMetricFamily(
            "cloister_replica_prefix_copies", "Copies of prefixes that a replica got from another one.", labels=("replica",)
        )
        promotions = CounterMetricFamily(
            "cloister_replica_promotions", "How often a replica that stood by took another one's place.", labels=("replica",)
        )
        state = GaugeMetricFamily("cloister_replica_state", "How a replica is; always 1.", labels=("replica", "state"))
        role = GaugeMetricFamily("cloister_replica_role", "What a replica computes; always 1.", labels=("replica", "role"))
        for replica in replicas:
            label = (str(replica.index),)
            up.add_metric(label, float(replica.is_accepting))
            requests.add_metric(label, replica.num_requests)
            waiting.add_metric(label, replica.num_waiting)
            usage.add_metric(label, replica.num_used_blocks / max(1, replica.num_total_blocks))
            slowness.add_metric(label, replica.slowness)
            mismatches.add_metric(label, replica.num_mismatches)
            routed.add_metric(label, replica.num_routed)
            moved.add_metric(label, replica.num_migrated)
            loads.add_metric(label, replica.num_kv_loads)
            copies.add_metric(label, replica.num_prefix_copies)
            promotions.add_metric(label, replica.num_promotions)
            state.add_metric((*label, replica.state), 1)
            role.add_metric((*label, replica.role), 1)
        yield from (up, requests, waiting, usage, slowness, mismatches, routed, moved, loads, copies, promotions, state, role)
        actions = CounterMetricFamily(
            "cloister_replica_actions",
            "Moves by load, drains, flips, updates, additions and removals of replicas.",
            labels=("action",),
        )
        for action, count in self._engine.action_counts().items():
            actions.add_metric((action,), count)
        yield actions

    def _lengths(self) -> Iterator[Metric]:
        """Yields the error of predicted lengths, if anything predicts them."""
        if (errors := self._engine.length_errors()) is None:
            return
        for name, text, value in (
            ("answers", "Answers whose length was predicted, and that the model ended.", errors.num_answers),
            ("tokens", "Tokens of these answers.", errors.num_tokens),
            ("tokens_error", "Sum of the absolute errors of their predicted mean lengths.", errors.num_error_tokens),
            ("above_p90", "Those that were longer than their predicted 90th percentile.", errors.num_above_p90),
        ):
            yield CounterMetricFamily(f"cloister_predicted_{name}", text, value=value)

    def _processes(self) -> list[tuple[str, int | None]]:
        return [("front", None), *self._engine.processes]  # an engine in a thread has no own process

    def _memory(self) -> list[tuple[str, float]]:
        return [(name, resident_bytes(pid)) for name, pid in self._processes()]

    def _cpu(self) -> Metric:
        # Prometheus treats a counter that fell, such as that of a restarted engine, as a reset.
        family = CounterMetricFamily("cloister_process_cpu_seconds", "Processor time of a process.", labels=("process",))
        for name, pid in self._processes():
            if (used_s := cpu_seconds(pid)) is not None:
                family.add_metric((name,), used_s)
        return family

    def _model(self) -> Metric:
        model = self._engine.model
        labels = {
            "model_name": self._model_name,
            "fingerprint": model.fingerprint,
            "max_model_len": str(model.max_model_len),
            "version": cloister.__version__,
        }
        info = GaugeMetricFamily("cloister_model_info", "The model that is served; always 1.", labels=tuple(labels))
        info.add_metric(tuple(labels.values()), 1)
        return info


def _gauges(name: str, text: str, label: str, values: Sequence[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"cloister_{name}", text, labels=(label,))
    for key, value in values:
        family.add_metric((key,), value)
    return family


# The source of `/metrics`.


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Exposition(Protocol):
    """Collects metrics for Prometheus."""

    def observe(self, event: Event) -> None:
        """Records one event of the engine."""
        ...

    def count_reply(self, route: str, status: int) -> None:
        """Records the outcome of one HTTP request; `route` is the template, never the path."""
        ...

    def count_unread(self) -> None:
        """Records that a reply was ended because its client did not read it."""
        ...

    def render(self, *, for_operator: bool = True) -> bytes:
        """Returns the metrics in the Prometheus text format; those of single replicas, and of what tiers hold, for operators
        only."""
        ...


# The sums that a strict profile releases, and only after a threshold of requests.


class ReleasedCounts:
    """Counts everything, and shows only released counts."""

    def __init__(self, release: CountRelease) -> None:
        self._release = release
        self._num_ended = 0
        self._counts = dict.fromkeys(sorted(ALLOWED_COUNTS), 0)

    def observe(self, event: Event) -> None:
        """Records one event of the engine."""
        match event:
            case Ended(last=last):
                self._counts["prompt_tokens"] += event.num_prompt_tokens if last else 0
                self._counts["generation_tokens"] += event.num_output_tokens
                self._counts["requests"] += last
                self._num_ended += last
            case Preempted():
                self._counts["num_preemptions"] += 1
            case Stepped():
                self._counts["steps"] += 1
            case _:
                pass

    def count_reply(self, route: str, status: int) -> None:
        """Does nothing: refusals are not among the releasable counts."""

    def count_unread(self) -> None:
        """Does nothing, for the same reason."""

    def render(self, *, for_operator: bool = True) -> bytes:
        """Returns the sums as they were last released."""
        shown = self._release.publish(self._num_ended, self._counts)
        lines = [f"# TYPE cloister_{name}_total counter\ncloister_{name}_total {value}" for name, value in shown.items()]
        least = self._release.threshold
        note = (
            "# The privacy profile of this server shows sums over many requests only: the first after "
            f"{least} requests have ended, and new ones after {least} more. /health says whether it is well."
        )
        return "".join(f"{line}\n" for line in [note, *lines]).encode()
