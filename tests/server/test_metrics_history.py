"""What `/metrics` showed in the last day: exact at the end of each period, bounded, and kept only where the profile lets it."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import httpx
import pytest

from cloister.server.metrics import Metrics, MetricsReport, RecordedMetrics
from cloister.types.events import Arrived, Ended, Scheduled
from cloister.types.request import FinishReason
from tests.server.running_server import MODEL, make_gate, serving, start_speaking

RUNNING = "cloister_num_requests_running"
ENDED = 'cloister_request_success_total{finished_reason="stop"}'
DAY_S = 86_400


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorded(clock: Clock) -> RecordedMetrics:
    return RecordedMetrics(Metrics(), clock)


def begin(metrics: RecordedMetrics, request_id: str) -> None:
    metrics.observe(Arrived(request_id, 0.0, 4))
    metrics.observe(Scheduled(request_id, 0.0, 0.0, 0, 4))


def end(metrics: RecordedMetrics, request_id: str) -> None:
    counts = {"num_prompt_tokens": 4, "num_output_tokens": 3, "num_cached_tokens": 0}
    metrics.observe(Ended(request_id, 1, 0, 0.0, FinishReason.STOP, **counts, arrival_s=0.0, first_token_s=0.5, last=True))


def past_of(report: MetricsReport, series: str) -> list[tuple[float, float | None]]:
    """(age, value) of each reading."""
    place = report.series.index(series)
    return [(reading.age_s, reading.values[place]) for reading in report.readings]


def test_a_reading_says_how_things_were_at_the_end_of_its_minute(recorded, clock):
    begin(recorded, "a")
    clock.now_s += 90
    end(recorded, "a")
    clock.now_s += 40
    report = recorded.report()
    assert past_of(report, RUNNING) == [(70, 1), (10, 0)]
    assert past_of(report, ENDED) == [(70, 0), (10, 1)]


def test_minutes_in_which_nothing_happened_are_known_too(recorded, clock):
    begin(recorded, "a")
    end(recorded, "a")
    clock.now_s += 5 * 60
    begin(recorded, "b")
    assert [value for _, value in past_of(recorded.report(), ENDED)] == [1] * 5
    assert [value for _, value in past_of(recorded.report(), RUNNING)] == [0] * 5


def test_the_last_hour_is_kept_by_the_minute_and_the_day_by_ten(recorded, clock):
    for number in range((DAY_S + 7200) // 60):
        clock.now_s += 60
        begin(recorded, str(number))
        end(recorded, str(number))
    ages_min = [round(age / 60) for age, _ in past_of(recorded.report(), ENDED)]
    assert ages_min == sorted(ages_min, reverse=True)
    assert ages_min[-60:] == list(range(59, -1, -1))
    assert {one - other for one, other in pairwise(ages_min[:-60])} == {10}
    assert max(ages_min) == 1430
    values = [value for _, value in past_of(recorded.report(), ENDED)]
    assert values == sorted(values)


def test_a_server_that_idled_for_a_month_keeps_no_more_than_a_day(recorded, clock):
    clock.now_s += 30 * DAY_S
    report = recorded.report()
    assert len(report.readings) == 60 + 144 - 6
    assert max(reading.age_s for reading in report.readings) < DAY_S


def test_a_series_that_came_later_is_unknown_before(recorded, clock):
    clock.now_s += 60
    recorded.count_reply("/v1/models", 200)
    clock.now_s += 60
    recorded.count_reply("/v1/chat/completions", 429)
    recorded.count_reply("/v1/completions", 429)
    clock.now_s += 60
    assert [value for _, value in past_of(recorded.report(), 'cloister_http_replies_total{status="429"}')] == [None, None, 2]


def test_the_past_is_read_over_http_and_has_no_label_of_a_request(model_path, monkeypatch):
    monkeypatch.setattr("cloister.server.metrics.history.PERIOD_S", 0.05)
    with serving(model_path, lambda: start_speaking(model_path)) as server, httpx.Client(base_url=server.url) as client:
        client.post("/v1/completions", json={"model": MODEL, "prompt": "four", "max_tokens": 5})
        client.get("/v1/made-up-by-a-client")
        give_up_s = time.monotonic() + 300
        while not (report := client.get("/metrics/history").json())["readings"]:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
    assert {len(reading["values"]) for reading in report["readings"]} == {len(report["series"])}
    labels = set(re.findall(r'(\w+)="', "".join(report["series"])))
    assert labels <= {"finished_reason", "status", "le", "process"}


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_strict_profile_keeps_no_past(model_path, profile):
    with serving(model_path, lambda: start_speaking(model_path), gate=make_gate(profile)) as server:
        reply = httpx.get(f"{server.url}/metrics/history")
    assert reply.status_code == 403
    assert f"T6.profiling.metrics-history.{profile}" in reply.json()["error"]["message"]
