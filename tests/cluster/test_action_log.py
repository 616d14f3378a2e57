"""What controllers and operators do to replicas is in the log and in the metrics, as counts, with nothing of a request."""

from __future__ import annotations

import logging

import pytest

from cloister.cluster.action_log import MOVES_EVERY_S, ActionLog
from cloister.cluster.migration import Move
from cloister.types.clock import VirtualClock


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cloister")


def test_drains_flips_and_updates_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = ActionLog(VirtualClock())
    for index in (0, 2):
        log.note_drain(index)
    log.note_flip(2, "prefill")
    log.note_update()
    log.note_addition(1)
    log.note_removal(1)
    assert caplog.messages == [
        "replica 0 is drained (drain 1 since the start)",
        "replica 2 is drained (drain 2 since the start)",
        "replica 2 changes its role to prefill (flip 1 since the start)",
        "a rolling update begins (update 1 since the start)",
        "replica 1 is added (add 1 since the start)",
        "replica 1 is removed (remove 1 since the start)",
    ]
    assert {action: count for action, count in log.counts.items() if count} == {
        "drain": 2,
        "flip": 1,
        "update": 1,
        "add": 1,
        "remove": 1,
    }


def test_moves_are_logged_as_sums_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    log = ActionLog(clock)
    for name in ("secret", "other"):
        log.note_move(Move(name, 1))
    log.note_move(Move("third", 1, "room"))
    log.log_moves()
    assert not caplog.messages
    for _ in range(3):
        clock.advance(MOVES_EVERY_S)
        log.log_moves()
    [message] = caplog.messages
    assert message.endswith("so far: 2 to level load, 1 to make room, 0 to keep room for urgent ones")
    assert "secret" not in message
    assert log.counts["move_to_level"] == 2
