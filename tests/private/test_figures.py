"""The figures of a sealed node: by the minute, for many requests at once, and in no more detail than five latencies."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cloister.private.workers.metrics import BOUNDS_S, Figures

MINUTE = 1_800_000_000


class Clock:
    def __init__(self) -> None:
        self.now_s = float(MINUTE)

    def __call__(self) -> float:
        return self.now_s


def read(figures: Figures) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(figures.render(is_healthy=True).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_prometheus_reads_how_many_requests_ended_and_how_long_they_took() -> None:
    clock = Clock()
    figures = Figures(now=clock)
    for elapsed_s in (0.2, 3.0, 100.0):
        for _ in range(1000):
            figures.count(elapsed_s, answered=True)
    for _ in range(500):
        figures.count(0.1, answered=False)
    assert read(figures) == {("cloister_engine_healthy",): 1}
    clock.now_s += 60
    seen = read(figures)
    assert seen.pop(("cloister_minute_end_seconds",)) == MINUTE + 60
    counts = {key[1:]: value for key, value in seen.items() if key[0] == "cloister_minute_requests"}
    assert set(counts) == {*(("answered", str(bound)) for bound in (*BOUNDS_S, "+Inf")), ("cut",)}
    wanted = {("answered", "1"): 1000, ("answered", "5"): 1000, ("answered", "+Inf"): 1000, ("cut",): 500}
    for cell, count in counts.items():
        assert abs(count - wanted.get(cell, 0)) < 60


def test_nothing_is_shown_of_a_minute_with_one_request() -> None:
    clock = Clock()
    figures = Figures(now=clock)
    figures.count(0.2, answered=True)
    clock.now_s += 60
    assert read(figures) == {("cloister_engine_healthy",): 1}
