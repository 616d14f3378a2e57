"""When either end of a channel between two machines takes the other one for lost."""

from __future__ import annotations

from cloister.engine.heartbeats import LATE_S, LOOK_S, PAUSE_S, SILENT_S, SLOWEST_BYTES_S, Heartbeat, Silence


def looks_until_late(heartbeat: Heartbeat, most_s: float = 60.0) -> float:
    """Looks until it is late; returns the seconds that took."""
    num_looks = 0
    while not heartbeat.is_late:
        heartbeat.look()
        num_looks += 1
        assert num_looks * LOOK_S < most_s
    return num_looks * LOOK_S


def send_one(heartbeat: Heartbeat) -> None:
    while not heartbeat.look():
        pass


def test_an_engine_that_answers_is_never_late_and_gets_a_heartbeat_after_each_pause() -> None:
    heartbeat, num_sent = Heartbeat(), 0
    for _ in range(1000):
        num_sent += heartbeat.look()
        assert not heartbeat.is_late
        heartbeat.note_answer() if num_sent and heartbeat._is_awaited else None
    assert num_sent == 1000 * LOOK_S / PAUSE_S


def test_one_that_does_not_answer_is_late_after_a_few_seconds_and_gets_no_second_heartbeat() -> None:
    heartbeat = Heartbeat()
    send_one(heartbeat)
    assert LATE_S <= looks_until_late(heartbeat) <= LATE_S + LOOK_S
    assert not heartbeat.look()


def test_what_passes_extends_the_time_by_no_more_than_a_slow_network_takes() -> None:
    heartbeat = Heartbeat()
    heartbeat.note_sent(4 * SLOWEST_BYTES_S)  # a long prompt, ahead of the heartbeat
    send_one(heartbeat)
    heartbeat.note_received(4 * SLOWEST_BYTES_S)
    assert LATE_S + 8 <= looks_until_late(heartbeat) <= LATE_S + 8 + LOOK_S
    heartbeat.note_answer()
    send_one(heartbeat)
    assert looks_until_late(heartbeat) <= LATE_S + LOOK_S


def test_what_was_written_while_an_answer_was_awaited_is_ahead_of_the_next_heartbeat() -> None:
    heartbeat = Heartbeat()
    send_one(heartbeat)
    heartbeat.note_sent(8 * SLOWEST_BYTES_S)  # a long prompt, behind the heartbeat
    heartbeat.note_answer()
    send_one(heartbeat)
    assert LATE_S + 8 <= looks_until_late(heartbeat) <= LATE_S + 8 + LOOK_S
    heartbeat.note_answer()
    send_one(heartbeat)
    assert looks_until_late(heartbeat) <= LATE_S + LOOK_S, "the prompt has passed before the second answer"


def test_a_drip_is_no_answer() -> None:
    heartbeat, num_looks = Heartbeat(), 0
    send_one(heartbeat)
    while not heartbeat.is_late:
        heartbeat.look()
        heartbeat.note_received(100)  # a token at each look
        num_looks += 1
    assert num_looks * LOOK_S <= LATE_S + LOOK_S


def test_an_engine_waits_longer_than_a_worker_that_waits_for_the_last_answer() -> None:
    assert SILENT_S > LATE_S + PAUSE_S + LOOK_S
    silence, num_looks = Silence(), 0
    for _ in range(100):
        silence.look()
        silence.note_record()
    assert not silence.is_long
    while not silence.is_long:
        silence.look()
        num_looks += 1
    assert num_looks * LOOK_S == SILENT_S + LOOK_S


def test_an_engine_waits_for_what_it_sends_over_a_slow_network() -> None:
    """The worker, which waits for the answer behind that, sends nothing meanwhile."""
    heartbeat, silence = Heartbeat(), Silence()
    send_one(heartbeat)
    for _ in range(200):
        num_bytes = int(SLOWEST_BYTES_S * LOOK_S)
        silence.note_sent(num_bytes)
        silence.look()
        heartbeat.note_received(num_bytes)
        heartbeat.look()
        assert not heartbeat.is_late
        assert not silence.is_long
    silence.note_record()
    for _ in range(int(SILENT_S / LOOK_S) + 1):
        silence.look()
    assert silence.is_long
