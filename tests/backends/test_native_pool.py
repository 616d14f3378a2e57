"""The team of threads of the native back end: it shares a step's work, and takes no time while there is none."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cloister.backends.native.backend import NativeBackend
from tests.driving import RandomWeights, make_spec
from tests.native import build_native

WORK = make_spec(hidden=512, intermediate=1408, heads=(8, 2), head_dim=64, vocab=1000)


def cpu_time_s() -> float:
    used = os.times()
    return used.user + used.system


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_program_that_waits_takes_no_cpu_time() -> None:
    driver = build_native(WORK, RandomWeights(WORK), num_threads=4)
    driver.run("a", list(range(100)))
    time.sleep(0.05)  # longer than a worker spins
    before = cpu_time_s()
    time.sleep(1)
    assert cpu_time_s() - before < 0.05


def test_work_is_spread_over_the_team() -> None:
    driver = build_native(WORK, RandomWeights(WORK), num_threads=2)
    helped: set[str] = set()
    deadline_s = time.monotonic() + 30  # on a busy machine the helper may come too late for one step
    while not {"qkv", "attention", "gate_up", "down", "head"} <= helped:
        assert time.monotonic() < deadline_s, f"the helper took part in nothing but {helped}"
        with driver.program.record() as spans:  # type: ignore[attr-defined]
            driver.run("a", list(range(200)))
        driver.free("a")
        helped |= {span.name for span in spans if span.thread == 1}
        assert {span.thread for span in spans} <= {0, 1}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_threads_end_with_their_back_end() -> None:
    before = num_threads()
    backend = NativeBackend(num_threads=5, device="cpu", dtype="float32")
    assert num_threads() == before + 4
    del backend
    assert num_threads() == before
