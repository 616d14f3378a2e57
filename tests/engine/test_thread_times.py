"""The times of an engine's thread are those of the kernel, and unknown ones are zeros."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cloister.engine import thread_times
from cloister.engine.thread_times import ThreadTimes


def test_times_are_those_since_the_last_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schedstat"
    monkeypatch.setattr(thread_times, "_PATH", str(file))
    file.write_text("5000000000 2000000000 7\n")
    times = ThreadTimes()
    assert times.take(1.0) == (0.0, 0.0)
    file.write_text("5500000000 2250000000 9\n")
    assert times.take(1.001) == (0.0, 0.0)  # read a moment ago
    assert times.take(1.02) == (0.5, 0.25)
    assert times.take(1.04) == (0.0, 0.0)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel counts no waits for a processor")
def test_a_thread_that_computes_has_processor_time() -> None:
    times = ThreadTimes()
    times.take(1.0)
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    processor_s, starved_s = times.take(2.0)
    assert processor_s >= 0.04
    assert starved_s >= 0.0


@pytest.mark.parametrize("text", [None, "", "words of others\n"])
def test_a_system_that_does_not_say_gives_zeros(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schedstat"
    monkeypatch.setattr(thread_times, "_PATH", str(file))
    if text is not None:
        file.write_text(text)
    times = ThreadTimes()
    assert times.take(1.0) == times.take(2.0) == (0.0, 0.0)
