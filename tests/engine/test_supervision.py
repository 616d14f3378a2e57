"""Health means progress; restarts have a limit."""

from __future__ import annotations

from cloister.cluster.virtual.byte_tokenizer import open_tokenizer
from cloister.cluster.virtual.engine import make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.engine.supervision import LivenessProbe, Restarts, Watchdog
from cloister.types.clock import VirtualClock
from cloister.types.events import Arrived, Outputs, Ping, Stepped


def step(elapsed_s: float) -> Stepped:
    return Stepped(
        now_s=0.0, elapsed_s=elapsed_s, num_tokens=1, num_samples=1, num_running=1, num_waiting=0,
        num_used_blocks=1, num_cached_blocks=0, num_total_blocks=8,
    )  # fmt: skip


def look_for(watchdog: Watchdog, seconds: float, *, is_waited_for: bool, since_s: float = 0.0) -> None:
    for tick in range(int(seconds * 2)):
        watchdog.look(since_s + (tick + 1) * 0.5, is_waited_for=is_waited_for)


def test_an_engine_that_nobody_waits_for_never_hangs() -> None:
    watchdog = Watchdog(stall_timeout_s=5.0, first_step_timeout_s=5.0)
    look_for(watchdog, 100.0, is_waited_for=False)
    assert not watchdog.is_hung


def test_an_engine_without_a_step_hangs_after_its_patience() -> None:
    watchdog = Watchdog(stall_timeout_s=5.0, first_step_timeout_s=20.0)
    watchdog.note([step(0.01)])
    look_for(watchdog, 4.5, is_waited_for=True)
    assert not watchdog.is_hung
    look_for(watchdog, 1.0, is_waited_for=True, since_s=4.5)
    assert watchdog.is_stalled
    assert not watchdog.is_hung
    look_for(watchdog, 5.0, is_waited_for=True, since_s=5.5)
    assert watchdog.is_hung


def test_the_first_step_may_take_longer() -> None:
    watchdog = Watchdog(stall_timeout_s=5.0, first_step_timeout_s=20.0)
    look_for(watchdog, 10.0, is_waited_for=True)
    assert not watchdog.is_stalled
    look_for(watchdog, 10.5, is_waited_for=True, since_s=10.0)
    assert watchdog.is_stalled


def test_a_step_is_progress() -> None:
    watchdog = Watchdog(stall_timeout_s=5.0, first_step_timeout_s=5.0)
    for round_ in range(10):
        look_for(watchdog, 4.0, is_waited_for=True, since_s=round_ * 4.0)
        watchdog.note([step(0.01)])
    assert not watchdog.is_stalled


def test_an_engine_with_long_steps_may_stand_still_for_twenty_of_them() -> None:
    watchdog = Watchdog(stall_timeout_s=5.0, first_step_timeout_s=5.0)
    watchdog.note([step(2.0)])
    look_for(watchdog, 30.0, is_waited_for=True)
    assert not watchdog.is_stalled
    look_for(watchdog, 10.5, is_waited_for=True, since_s=30.0)
    assert watchdog.is_stalled
    for _ in range(500):
        watchdog.note([step(0.01)])  # it has become quick
    look_for(watchdog, 5.5, is_waited_for=True, since_s=40.5)
    assert watchdog.is_stalled


def test_an_arrival_is_no_progress_and_a_sign_of_life_is() -> None:
    watchdog = Watchdog(stall_timeout_s=5.0, first_step_timeout_s=5.0)
    for round_ in range(3):
        look_for(watchdog, 2.0, is_waited_for=True, since_s=round_ * 2.0)
        watchdog.note([Arrived("r", 0.0, 4)])
    assert watchdog.is_stalled
    watchdog.note([])
    assert not watchdog.is_stalled


def test_a_front_that_slept_does_not_blame_the_engine() -> None:
    watchdog = Watchdog(stall_timeout_s=5.0, first_step_timeout_s=5.0)
    watchdog.look(0.5, is_waited_for=True)
    watchdog.look(3600.0, is_waited_for=True)
    assert not watchdog.is_hung


def test_an_engine_is_stalled_before_it_hangs_however_seldom_the_front_looks() -> None:
    watchdog = Watchdog(stall_timeout_s=0.5, first_step_timeout_s=0.5)
    for number in range(1, 5):
        watchdog.look(3600.0 * number, is_waited_for=True)
        assert (watchdog.is_stalled, watchdog.is_hung) == (number >= 2, number == 4)


def test_each_restart_waits_longer_until_there_are_no_more() -> None:
    restarts = Restarts(max_restarts=3, window_s=100.0, backoff_s=1.0, max_backoff_s=3.0)
    assert [restarts.next_delay_s(float(now)) for now in range(4)] == [1.0, 2.0, 3.0, None]


def test_old_restarts_are_forgotten() -> None:
    restarts = Restarts(max_restarts=1, window_s=100.0, backoff_s=1.0)
    assert restarts.next_delay_s(0.0) == 1.0
    assert restarts.next_delay_s(99.0) is None
    assert restarts.next_delay_s(100.0) == 1.0


def test_an_engine_that_is_silent_is_asked_once_until_it_answers() -> None:
    probe = LivenessProbe(after_s=5.0)
    probe.note(1.0)
    assert [probe.look(now) for now in (2.0, 5.9, 6.0, 6.5, 20.0)] == [False, False, True, False, False]
    assert probe.is_open
    probe.note(21.0)
    assert not probe.is_open
    assert [probe.look(now) for now in (25.0, 26.0)] == [False, True]
    assert not any(LivenessProbe(after_s=None).look(now) for now in (0.0, 1e6)), "a front that knows all requests asks nothing"


def test_an_engine_with_nothing_to_do_answers_a_ping_once() -> None:
    core = make_engine(EngineShape(), open_tokenizer(), VirtualClock()).core
    assert core.step() is None
    core.input_queue.put(Ping())
    assert core.step() == Outputs([], [])
    assert core.step() is None
