"""Writes the Grafana dashboard: `python deploy/grafana/make_dashboard.py > deploy/grafana/dashboards/cloister.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

WIDTH: Final = 24
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
HERE: Final = 'instance=~"$instance"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        queries: (expression, legend).
        width: of the 24 columns.
        kind: `timeseries`, `stat`, `bargauge` or `table`.
    """

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    width: int = 8
    height: int = 8
    kind: str = "timeseries"
    stacked: bool = False
    steps: tuple[tuple[str, float | None], ...] = (("green", None),)
    maximum: float | None = None


def rate(name: str, by: str = "instance") -> str:
    """Returns what a counter gains a second."""
    return f"sum by ({by}) (rate(cloister_{name}_total{{{HERE}}}[$__rate_interval]))"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """Returns median, 90th and 99th percentile of a histogram."""
    buckets = f"sum by (instance, le) (rate(cloister_{name}_bucket{{{HERE}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {buckets})", f"{{{{instance}}}} p{q * 100:g}") for q in (0.5, 0.9, 0.99))


def mean(name: str) -> str:
    """Returns the mean of a histogram."""
    parts = (f"sum by (instance) (rate(cloister_{name}_{part}{{{HERE}}}[$__rate_interval]))" for part in ("sum", "count"))
    return " / ".join(parts)


def gauge(name: str, labels: str = "") -> str:
    """Returns a gauge as it is."""
    return f"cloister_{name}{{{', '.join(filter(None, (HERE, labels)))}}}"


EACH: Final = "{{instance}}"
WARN_HIGH: Final = (("green", None), ("orange", 0.8), ("red", 0.95))
HIT_RATE: Final = f"{rate('prefix_cache_hits')} / {rate('prefix_cache_queries')}"
BY_PLACE: Final = " / ".join(
    rate(f"spec_decode_num_{what}_tokens_per_pos", "drafter, position") for what in ("accepted", "draft")
)

ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "Now",
        (
            Panel("Engine", "1 while steps advance or nothing waits.", ((gauge("engine_healthy"), EACH),), "short", 3, 4,
                  "stat", steps=(("red", None), ("green", 1))),
            Panel("Running", "Requests that have KV blocks.", ((gauge("num_requests_running"), EACH),), "short", 3, 4, "stat"),
            Panel("Waiting", "Requests without a slot.", ((gauge("num_requests_waiting"), EACH),), "short", 3, 4, "stat",
                  steps=(("green", None), ("orange", 1), ("red", 100))),
            Panel("Tokens per second", "Output tokens.", ((rate("generation_tokens"), EACH),), "short", 4, 4, "stat"),
            Panel("KV cache in use", "Part of the KV blocks that sequences hold.", ((gauge("kv_cache_usage_perc"), EACH),),
                  "percentunit", 4, 4, "bargauge", steps=WARN_HIGH, maximum=1),
            Panel("Model", "What is served.", ((gauge("model_info"), ""),), "short", 7, 4, "table"),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", "From arrival at the engine.", quantiles("time_to_first_token_seconds"), "s"),
            Panel("Time between tokens", "After the first one.", quantiles("inter_token_latency_seconds"), "s"),
            Panel("Whole answers", "From arrival to the last token.", quantiles("e2e_request_latency_seconds"), "s"),
            Panel("Time in the queue", "From arrival to the first slot.", quantiles("request_queue_time_seconds"), "s"),
            Panel("Prefill", "From the first slot to the first token.", quantiles("request_prefill_time_seconds"), "s"),
            Panel("Decode", "From the first token to the last one.", quantiles("request_decode_time_seconds"), "s"),
        ),
    ),
    (
        "Traffic",
        (
            Panel("Tokens", "Prompt tokens scheduled and tokens generated, per second.",
                  ((rate("prompt_tokens"), "{{instance}} prompt"), (rate("generation_tokens"), "{{instance}} generated"))),
            Panel("Ends of sequences", "By reason, per second.",
                  ((rate("request_success", "finished_reason"), "{{finished_reason}}"),), stacked=True),
            Panel("HTTP replies", "By status, per second.", ((rate("http_replies", "status"), "{{status}}"),), stacked=True),
            Panel("Running and waiting", "Requests.",
                  ((gauge("num_requests_running"), "{{instance}} running"),
                   (gauge("num_requests_waiting"), "{{instance}} waiting"))),
            Panel("Prompt length", "Tokens.", quantiles("request_prompt_tokens")),
            Panel("Answer length", "Tokens.", quantiles("request_generation_tokens")),
        ),
    ),
    (
        "Replicas",
        (
            Panel("States", "Of replicas that do not run well: lost, starting, stalled, drained and others.",
                  ((gauge("replica_state", 'state!~"running|idle|standby"'), "{{instance}} {{replica}} {{state}}"),),
                  maximum=1),
            Panel("Requests of a replica", "Waiting ones included.",
                  ((gauge("replica_requests"), "{{instance}} {{replica}}"),), stacked=True),
            Panel("KV cache of a replica", "Part of its KV blocks that sequences hold.",
                  ((gauge("replica_kv_cache_usage_perc"), "{{instance}} {{replica}}"),), "percentunit", maximum=1),
            Panel("Restarts of engines", "Engines that were started in place of one that died or hung, in the last half hour.",
                  ((f"increase(cloister_replica_restarts_total{{{HERE}}}[30m])", "{{instance}} {{replica}}"),)),
        ),
    ),
    (
        "Speculation",
        (
            Panel("Tokens for each draft", "Accepted ones and the model's own: what a sequence gains by a step that drafts.",
                  ((f"1 + {rate('spec_decode_num_accepted_tokens', 'drafter')} / {rate('spec_decode_num_drafts', 'drafter')}",
                    "{{drafter}}"),)),
            Panel("Accepted", "Part of the tokens drafted, by their place in the draft.",
                  ((BY_PLACE, "{{drafter}} {{position}}"),), "percentunit", maximum=1),
            Panel("Drafted and accepted", "Tokens per second.",
                  ((rate("spec_decode_num_draft_tokens", "drafter"), "{{drafter}} drafted"),
                   (rate("spec_decode_num_accepted_tokens", "drafter"), "{{drafter}} accepted"))),
            Panel("Time saved", "Seconds per second: of steps made needless, less what drafting and verification added.",
                  ((f"{rate('spec_decode_gained_seconds')} - {rate('spec_decode_spent_seconds')}", EACH),), "s"),
            Panel("Time of drafters", "Seconds per second.",
                  ((rate("spec_decode_draft_seconds", "drafter"), "{{drafter}}"),), "s", stacked=True),
        ),
    ),
    (
        "Memory and steps",
        (
            Panel("KV blocks", "Used, kept for reuse, and free.",
                  ((f"sum by (state) ({gauge('kv_blocks')})", "{{state}}"),), stacked=True),
            Panel("Prefix cache hits", "Part of the prompt tokens looked up that were found.", ((HIT_RATE, EACH),),
                  "percentunit", maximum=1),
            Panel("Preemptions", "Sequences that lost their blocks, per second.", ((rate("num_preemptions"), EACH),)),
            Panel("Time of a step", "", quantiles("step_time_seconds"), "s"),
            Panel("Tokens in a step", "Mean.", ((mean("step_tokens"), EACH),)),
            Panel("Memory in use", "Of both processes.", ((gauge("process_memory_bytes"), "{{process}}"),), "bytes"),
            Panel("Memory budget", "As it was made at the start.", ((gauge("memory_budget_bytes"), "{{part}}"),), "bytes",
                  4, 8, "bargauge"),
            Panel("Start", "By phase.", ((gauge("startup_seconds"), "{{phase}}"),), "s", 4, 8, "bargauge"),
        ),
    ),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana's JSON model."""
    return {
        "uid": "cloister",
        "title": "Cloister",
        "description": "A language-model server: latency, traffic, memory.",
        "tags": ["llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_data_source(), _instances()]},
        "panels": list(_lay_out(ROWS)),
    }


def _lay_out(rows: Sequence[tuple[str, Sequence[Panel]]]) -> Iterator[dict[str, Any]]:
    """Yields panels from left to right and from top to bottom, each row under its title."""
    numbers, y = count(1), 0
    for title, panels in rows:
        yield {
            "id": next(numbers),
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _grid(0, y, WIDTH, 1),
        }
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + panel.height
            yield {"id": next(numbers), **_panel(panel), "gridPos": _grid(x, y, panel.width, panel.height)}
            x += panel.width
        y += panels[-1].height


def _grid(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    steps = [{"color": color, "value": value} for color, value in panel.steps]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {
            "fillOpacity": 40 if panel.stacked else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": stacking,
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(panel, i, *query) for i, query in enumerate(panel.queries)],
        **({"transformations": [_COLUMNS]} if panel.kind == "table" else {}),
    }


def _target(panel: Panel, index: int, expression: str, legend: str) -> dict[str, Any]:
    found: dict[str, Any] = {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
    if panel.kind != "timeseries":
        found["instant"] = True
    return {**found, "format": "table"} if panel.kind == "table" else found


_LAST: Final = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
    "stat": {"reduceOptions": _LAST, "colorMode": "value", "graphMode": "area", "textMode": "auto"},
    "bargauge": {"reduceOptions": _LAST, "displayMode": "gradient", "orientation": "horizontal", "showUnfilled": True},
    "table": {"showHeader": True, "cellHeight": "sm"},
}
_COLUMNS: Final = {
    "id": "organize",
    "options": {
        "excludeByName": {"Time": True, "Value": True, "__name__": True, "job": True},
        "renameByName": {"model_name": "model", "max_model_len": "window"},
    },
}


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _instances() -> dict[str, Any]:
    query = "label_values(cloister_engine_healthy, instance)"
    return {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "instances"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def write() -> str:
    """Returns the dashboard as text."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    print(write(), end="")
