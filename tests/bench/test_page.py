"""The report of a run as one HTML file."""

import re
from html.parser import HTMLParser

import pytest

from cloister.bench.measure import Measurement
from cloister.bench.page import NUM_SLOWEST, render_page
from cloister.bench.recorder import RequestRecord
from cloister.bench.report import LatencyObjective, summarise


def measure(num: int = 30, name: str = "run") -> Measurement:
    records = [RequestRecord(i, 0.0, i + 2.0, 100 + i, 2, ((i + 1.0, 1), (i + 2.0, 1))) for i in range(num)]
    records.append(RequestRecord(num, 0.0, 0.5, 9, 0, failure="http_429"))
    return Measurement(summarise(name, records, LatencyObjective(ttft_s=5)), records)


class Outside(HTMLParser):
    """Collects whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attrs if name in ("src", "href") and value and not value.startswith("data:")]


@pytest.fixture(scope="module")
def page() -> str:
    """The page of a run; its plots take a second."""
    return render_page("run", measure(), {"rate": 4.5, "trace": None})


def test_the_page_fetches_nothing(page: str) -> None:
    outside = Outside()
    outside.feed(page)
    assert outside.fetched == []
    assert "<script" not in page
    assert "data:image/svg+xml;base64," in page


def test_figures_and_settings_are_those_of_the_run(page: str) -> None:
    assert "30 of 31" in page
    assert re.search(r"<code>rate</code></td><td>4\.5<", page)
    assert "trace" not in page


def test_failed_requests_lead_the_slowest_ones(page: str) -> None:
    ends = re.findall(r'<td class="(?:good|bad)">([^<]+)<', page)
    assert ends == ["http_429"] + ["answered"] * (NUM_SLOWEST - 1)


def test_names_cannot_write_into_the_page() -> None:
    page = render_page("<img src=x>", measure(name="<b>"), {"url": "<script>"})
    assert "<img src=x>" not in page
    assert "<script>" not in page


def test_a_run_without_one_answer_has_a_page_too() -> None:
    records = [RequestRecord(0, 0.0, 1.0, 9, 0, failure="timeout")]
    assert "0 of 1" in render_page("run", Measurement(summarise("run", records), records), {})
