"""The virtual event loop: time passes only when nothing else can be done."""

from __future__ import annotations

import asyncio
import signal

import pytest

from cloister.cluster.virtual.event_loop import BUSY, STUCK, run_virtually


def test_an_hour_of_sleep_takes_no_time_and_timers_run_in_their_order() -> None:
    async def main() -> tuple[list[float], float]:
        loop, woken = asyncio.get_running_loop(), []

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(round(loop.time(), 6))

        await asyncio.gather(*(sleep(seconds) for seconds in (3600.0, 0.5, 60.0)))
        return woken, loop.time()

    woken, ended_s = run_virtually(main())
    assert woken == [0.5, 60.0, 3600.0]
    assert ended_s == pytest.approx(3600.0)


def test_a_program_that_waits_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=STUCK):
        run_virtually(main())


def test_a_program_that_never_lets_time_pass_is_an_error() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match=BUSY):
        run_virtually(main())


def test_equal_timers_run_in_the_order_in_which_they_were_set_and_cancelled_ones_do_not() -> None:
    async def main() -> list[int]:
        loop, ran = asyncio.get_running_loop(), []
        timers = [loop.call_later(1.0, ran.append, number) for number in range(8)]
        for timer in (timers[3], loop.call_soon(ran.append, 8)):
            timer.cancel()
        await asyncio.sleep(2.0)
        return ran

    assert run_virtually(main()) == [0, 1, 2, 4, 5, 6, 7]


def test_what_a_callback_raises_reaches_the_handler_and_stops_nothing() -> None:
    async def main() -> list[object]:
        loop, seen = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
        loop.call_later(1.0, {}.__getitem__, "missing")
        await asyncio.sleep(2.0)
        return seen

    (error,) = run_virtually(main())
    assert isinstance(error, KeyError)


def test_ctrl_c_ends_a_program_that_goes_on_when_it_is_cancelled() -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGINT)
        for _ in range(3):  # as an engine that ends its steps first
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")
        seen.append("went on")

    seen: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_virtually(main())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen[0] == "cancelled"  # by the end of the loop, after the interrupt


def test_ctrl_c_in_a_finalizer_is_not_lost() -> None:
    class Interrupting:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        waste = Interrupting()
        del waste
        await asyncio.sleep(60)
        pytest.fail("it went on")

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_virtually(main())
    finally:
        signal.signal(signal.SIGINT, before)
