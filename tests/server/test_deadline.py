"""One timer for many waits says what a timer for each would have said."""

from __future__ import annotations

import asyncio

import pytest

from cloister.server.deadline import Deadline, Patience
from tests.virtual_time import run


def test_many_short_waits_pass_until_the_deadline_and_none_after_it():
    async def wait_again_and_again() -> int:
        deadline, num_waits = Deadline(0.1), 0
        try:
            while True:
                with deadline:
                    await asyncio.sleep(0.01)
                num_waits += 1
        except TimeoutError:
            pass
        with pytest.raises(TimeoutError), deadline:
            await asyncio.sleep(0)
        return num_waits

    assert run(wait_again_and_again()) in (9, 10)


def test_a_deadline_cuts_a_long_wait_and_leaves_its_task_well():
    async def wait_long() -> int:
        deadline = Deadline(0.05)
        with pytest.raises(TimeoutError), deadline:
            await asyncio.sleep(5)
        assert asyncio.get_running_loop().time() == pytest.approx(0.05)
        await asyncio.sleep(0.01)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert run(wait_long()) == 0


def test_a_deadline_that_passes_between_two_waits_harms_nothing_but_the_next_wait():
    async def work_between() -> str:
        deadline = Deadline(0.02)
        with deadline:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError), deadline:
            raise AssertionError("the wait began")
        return "done"

    assert run(work_between()) == "done"


def test_somebody_elses_cancellation_is_passed_on():
    async def cancelled_at_the_deadline() -> None:
        deadline = Deadline(0.02)
        with deadline:
            await asyncio.sleep(5)

    async def main() -> bool:
        task = asyncio.create_task(cancelled_at_the_deadline())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(0.02, task.cancel)  # both are due at once
        await asyncio.wait([task])
        return task.cancelled()

    assert run(main())


def test_a_closed_deadline_never_passes():
    async def close_early() -> None:
        deadline = Deadline(0.02)
        deadline.close()
        with deadline:
            await asyncio.sleep(0.06)

    run(close_early())


def test_patience_ends_with_one_wait_that_lasts_too_long_and_not_with_many_short_ones():
    async def write(longest_s: float) -> list[float]:
        loop = asyncio.get_running_loop()
        given_up: list[float] = []
        patience = Patience(0.1, lambda: given_up.append(loop.time()))
        for _ in range(10):
            patience.since_s = loop.time()
            await asyncio.sleep(0.02)
            patience.since_s = None
        patience.since_s = loop.time()
        start_s = loop.time()
        await asyncio.sleep(longest_s)
        patience.close()
        return [moment - start_s for moment in given_up]

    assert run(write(0.02)) == []
    (after_s,) = run(write(0.3))
    assert after_s == pytest.approx(0.1)
