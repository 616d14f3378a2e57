"""The team of threads of the native back end: it shares a step's work, and takes no time while there is none."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from cloister.backends.base import LOGITS, KVLayout
from cloister.backends.native.backend import NativeBackend
from tests.driving import Driver, RandomWeights, make_spec
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
    give_up_s, used_s = time.monotonic() + 300, math.inf
    while used_s >= 0.05:  # first workers spin for a while, on a busy machine a long one, as threads of other tests may
        assert time.monotonic() < give_up_s, "threads spin while there is nothing to do"
        before_s = cpu_time_s()
        time.sleep(1)
        used_s = cpu_time_s() - before_s


def test_work_is_spread_over_the_team() -> None:
    driver = build_native(WORK, RandomWeights(WORK), num_threads=2)
    helped: set[str] = set()
    deadline_s = time.monotonic() + 300  # on a busy machine the helper may come too late for one step
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


def in_a_child(work: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Forks, and returns what `work` returned there; False when it raised or the deadline passed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is what is tested
        child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    driver = build_native(WORK, RandomWeights(WORK), num_threads=3)
    expected = driver.run("a", list(range(200))).tobytes()

    def step() -> bool:
        alone = num_threads() == 1
        return alone and driver.run("b", list(range(200))).tobytes() == expected and num_threads() == 3

    assert in_a_child(step)
    assert driver.run("c", list(range(200))).tobytes() == expected


def test_a_fork_in_the_middle_of_a_step_leaves_both_with_a_whole_program() -> None:
    driver = build_native(WORK, RandomWeights(WORK), num_threads=2)
    tokens = list(range(300))
    expected = driver.run("a", tokens).tobytes()
    batch = driver.plan({"b": tokens})
    stop = threading.Event()
    found: list[bool] = []

    def repeat() -> None:
        while not stop.is_set():
            found.append(driver.program.step(batch, LOGITS).logits.tobytes() == expected)

    worker = threading.Thread(target=repeat)
    worker.start()
    try:
        for _ in range(5):
            assert in_a_child(lambda: driver.run("c", tokens).tobytes() == expected)
    finally:
        stop.set()
        worker.join(300)
    assert found
    assert all(found)


def test_threads_that_share_a_back_end_take_turns() -> None:
    weights = RandomWeights(WORK)
    backend = NativeBackend(num_threads=2, device="cpu", dtype="float32")
    drivers = [Driver(backend.build(WORK, weights, KVLayout(64, 16)), 64, 16) for _ in range(2)]
    tokens = [list(range(start, start + 70)) for start in (0, 100, 200, 300)]
    jobs = [(driver.program, driver.plan({number: tokens[number]})) for number, driver in enumerate([*drivers, *drivers])]
    expected = [program.step(batch, LOGITS).logits.tobytes() for program, batch in jobs]
    wrong: list[int] = []

    def repeat(number: int) -> None:
        program, batch = jobs[number]
        for _ in range(20):
            if program.step(batch, LOGITS).logits.tobytes() != expected[number]:
                wrong.append(number)

    callers = [threading.Thread(target=repeat, args=(number,), daemon=True) for number in range(len(jobs))]
    for caller in callers:
        caller.start()
    deadline_s = time.monotonic() + 300
    for caller in callers:
        caller.join(max(0.0, deadline_s - time.monotonic()))
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []
