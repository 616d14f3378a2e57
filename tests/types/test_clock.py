"""A stopwatch's laps follow one another and add up."""

from __future__ import annotations

from cloister.types.clock import Stopwatch, VirtualClock


def test_laps_are_what_went_by_between_them():
    clock = VirtualClock(5.0)
    watch = Stopwatch(clock)
    clock.advance(2.0)
    watch.lap("read")
    clock.advance(0.5)
    watch.lap("build")
    assert watch.laps == [("read", 2.0), ("build", 0.5)]
