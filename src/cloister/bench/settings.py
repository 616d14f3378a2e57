"""Settings of a measurement; the command line's flags are generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from cloister.types.config import setting


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """The requests to send."""

    trace: str | None = setting(
        None,
        "Azure or Vidur CSV, Mooncake JSONL, or any CSV or JSONL with lengths or prompts; plain or .gz. "
        "Unset, every request has `input_tokens` and `output_tokens`.",
    )
    input_tokens: int = setting(128, "Prompt length without a trace.", low=1)
    output_tokens: int = setting(64, "Answer length without a trace.", low=1)
    num_requests: int = setting(64, "Requests to send: the first ones of the trace that fit.", low=1)
    scale_lengths: str = setting("1", "Factor on every length, such as 1/16.")
    max_request_tokens: int | None = setting(
        None, "Leave out requests with a longer prompt and answer; unset, those that the context window cannot hold.", low=2
    )
    seed: int = setting(0, "Seed of random prompts and Poisson arrivals.", low=0)
    num_warmup: int = setting(2, "Warm-up requests before the run.", low=0)


@dataclass(frozen=True, slots=True)
class ArrivalsConfig:
    """Arrival times of requests."""

    arrivals: str | None = setting(
        None,
        "The trace's times, a Poisson process of `rate`, or all at once. Unset, recorded if the trace has times, else poisson"
        " with a `rate` and burst without.",
        choices=("recorded", "poisson", "burst"),
    )
    rate: float | None = setting(None, "Requests per second; recorded times are stretched to it.", low=0)


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """The service-level objective. Without limits, a request meets it within 1.5 times its time alone."""

    slo_ttft_ms: float | None = setting(None, "Limit on the time to first token.", low=0)
    slo_tbt_ms: float | None = setting(None, "Limit on a request's 99th percentile time between tokens.", low=0)


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The server under test."""

    url: str = setting("http://127.0.0.1:8000", "Server to measure.")
    api_model: str | None = setting(None, "Model to ask for; unset, the first one that the server lists.")
    api_key_file: str | None = setting(None, "File that holds an API key.")
    timeout_s: float = setting(600.0, "Deadline of a request.", low=0.1)


BURST = ArrivalsConfig(arrivals="burst")
