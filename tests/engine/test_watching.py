"""Health means progress; restarts have a limit."""

from __future__ import annotations

from cloister.engine.restarts import Restarts
from cloister.engine.watchdog import Watchdog


def look_for(watchdog: Watchdog, seconds: float, *, is_waited_for: bool, since_s: float = 0.0) -> None:
    for tick in range(int(seconds * 2)):
        watchdog.look(since_s + (tick + 1) * 0.5, is_waited_for=is_waited_for)


def test_an_engine_that_nobody_waits_for_never_hangs() -> None:
    watchdog = Watchdog(patience_s=5.0, first_patience_s=5.0)
    look_for(watchdog, 100.0, is_waited_for=False)
    assert not watchdog.is_hung


def test_an_engine_without_a_step_hangs_after_its_patience() -> None:
    watchdog = Watchdog(patience_s=5.0, first_patience_s=20.0)
    watchdog.advance()
    look_for(watchdog, 4.5, is_waited_for=True)
    assert not watchdog.is_hung
    look_for(watchdog, 1.0, is_waited_for=True, since_s=4.5)
    assert watchdog.is_hung


def test_the_first_step_may_take_longer() -> None:
    watchdog = Watchdog(patience_s=5.0, first_patience_s=20.0)
    look_for(watchdog, 10.0, is_waited_for=True)
    assert not watchdog.is_hung
    look_for(watchdog, 10.5, is_waited_for=True, since_s=10.0)
    assert watchdog.is_hung


def test_a_step_is_progress() -> None:
    watchdog = Watchdog(patience_s=5.0, first_patience_s=5.0)
    for round_ in range(10):
        look_for(watchdog, 4.0, is_waited_for=True, since_s=round_ * 4.0)
        watchdog.advance()
    assert not watchdog.is_hung


def test_a_front_that_slept_does_not_blame_the_engine() -> None:
    watchdog = Watchdog(patience_s=5.0, first_patience_s=5.0)
    watchdog.look(0.5, is_waited_for=True)
    watchdog.look(3600.0, is_waited_for=True)
    assert not watchdog.is_hung


def test_each_restart_waits_longer_until_there_are_no_more() -> None:
    restarts = Restarts(max_restarts=3, window_s=100.0, backoff_s=1.0, max_backoff_s=3.0)
    assert [restarts.next_delay_s(float(now)) for now in range(4)] == [1.0, 2.0, 3.0, None]


def test_old_restarts_are_forgotten() -> None:
    restarts = Restarts(max_restarts=1, window_s=100.0, backoff_s=1.0)
    assert restarts.next_delay_s(0.0) == 1.0
    assert restarts.next_delay_s(99.0) is None
    assert restarts.next_delay_s(100.0) == 1.0
