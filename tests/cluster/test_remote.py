"""An engine on another machine answers as one here does, whatever happens to the network between."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path

import pytest

from cloister.types.errors import ConfigError, MemoryBudgetError
from cloister.types.events import Ended, Event
from cloister.types.request import FinishReason, Request, SequenceOutput
from tests.cluster.remote_hosts import Remote, make_remote, serving
from tests.engine.replica import TRIGGER, VOCAB_SIZE, make_request
from tests.history_program import greedy_continuation


def run(main: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 600.0))


async def answer(remote: Remote, request: Request) -> list[SequenceOutput]:
    return [output async for output in remote.client.generate(request)]


def check(request: Request, outputs: list[SequenceOutput]) -> None:
    expected = greedy_continuation(request.token_ids, request.sampling.max_tokens, VOCAB_SIZE)
    assert [token_id for output in outputs for token_id in output.token_ids] == expected


async def until(condition: object) -> None:
    give_up_s = asyncio.get_running_loop().time() + 300
    while not condition():  # type: ignore[operator]
        assert asyncio.get_running_loop().time() < give_up_s, "it did not come to pass"
        await asyncio.sleep(0.01)


async def begin(remote: Remote, *requests: Request) -> list[asyncio.Task[list[SequenceOutput]]]:
    """Asks for answers; returns when the engine has begun with each of them."""
    begun: set[str] = set()

    async def follow(request: Request) -> list[SequenceOutput]:
        outputs = []
        async for output in remote.client.generate(request):
            outputs.append(output)
            begun.add(request.request_id)
        return outputs

    answers = [asyncio.create_task(follow(request)) for request in requests]
    await until(lambda: len(begun) == len(requests))
    return answers


def test_it_answers_and_its_times_are_of_this_clock(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as remote:
            events: list[Event] = []
            remote.client.subscribe(events.append)
            begun_s = asyncio.get_running_loop().time()
            requests = [make_request(f"request {number}", max_tokens=20) for number in range(8)]
            for request, outputs in zip(requests, await asyncio.gather(*(answer(remote, r) for r in requests)), strict=True):
                check(request, outputs)
            now_s = asyncio.get_running_loop().time()
            ended = [event for event in events if isinstance(event, Ended)]
            assert len(ended) == 8
            for event in ended:
                assert event.first_token_s is not None
                assert begun_s - 0.05 <= event.arrival_s <= event.first_token_s <= event.now_s <= now_s
            assert remote.client.processes == []

    run(main())


def test_a_message_of_many_chunks_arrives_whole(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as remote:
            request = make_request([1] * 500_000, max_tokens=5)  # too long for the model, so the engine refuses it
            outputs = await answer(remote, request)
            assert outputs[-1].finish_reason is FinishReason.REJECTED
            check(request := make_request("and on", max_tokens=5), await answer(remote, request))

    run(main())


def test_connections_that_break_lose_nothing_and_restart_nothing(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, "build_slow") as remote:
            requests = [make_request(f"request {number}", max_tokens=40) for number in range(4)]
            answers = await begin(remote, *requests)
            for number in range(3):
                await until(lambda number=number: len(remote.network.connections) == number + 1)
                await asyncio.sleep(0.2)  # so that something is under way
                remote.network.break_connections()
            for request, outputs in zip(requests, await asyncio.gather(*answers), strict=True):
                check(request, outputs)
            await until(lambda: len(remote.network.connections) == 4)
            assert remote.placement.num_starts == 1

    run(main())


def test_a_cut_that_is_shorter_than_the_limit_loses_nothing(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, "build_slow") as remote:
            request = make_request("a long story", max_tokens=40)
            [answering] = await begin(remote, request)
            remote.network.is_cut = True
            await asyncio.sleep(1.5)
            remote.network.is_cut = False
            check(request, await answering)
            assert remote.placement.num_starts == 1

    run(main())


def test_an_engine_behind_a_cut_is_lost_on_both_sides_and_a_new_one_resumes_its_requests(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, "build_slow") as remote:
            request = make_request("a long story", max_tokens=60)
            [answering] = await begin(remote, request)
            assert remote.placement.process is not None
            (engine,) = children(remote.placement.process.pid)
            remote.network.is_cut = True
            await until(lambda: remote.client.closed is not None)
            await until(lambda: not Path(f"/proc/{engine}").exists())
            remote.network.is_cut = False
            check(request, await answering)

    run(main())


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("victim", ["host", "engine"])
def test_a_request_survives_the_death_of_its_host_or_engine(model_path: Path, victim: str) -> None:
    async def main() -> None:
        async with serving(model_path, "build_slow") as remote:
            request = make_request("a long story", max_tokens=40)
            [answering] = await begin(remote, request)
            assert remote.placement.process is not None
            host = remote.placement.process.pid
            (engine,) = children(host)
            os.kill(host if victim == "host" else engine, signal.SIGKILL)
            check(request, await answering)
            assert remote.placement.num_starts == (2 if victim == "host" else 1)
            await until(lambda: not Path(f"/proc/{engine}").exists())

    run(main())


def test_an_engine_that_hangs_is_killed_and_its_host_starts_another_one(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, "build_hanging", first_step_s=2.0, stall_timeout_s=1.0) as remote:
            check(request := make_request("warm up", max_tokens=3), await answer(remote, request))
            poison = make_request([TRIGGER, 1], max_tokens=3)
            assert (await answer(remote, poison))[-1].finish_reason is FinishReason.ERROR  # it killed three engines
            await until(lambda: remote.client.closed is None)
            check(request := make_request("still here", max_tokens=3), await answer(remote, request))
            assert remote.placement.num_starts == 1

    run(main())


@pytest.mark.slow  # a link is lost after five seconds, twice; a cut network above is the quicker one
def test_a_host_that_hangs_is_replaced(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, "build_slow") as remote:
            request = make_request("a long story", max_tokens=40)
            [answering] = await begin(remote, request)
            assert remote.placement.process is not None
            os.kill(remote.placement.process.pid, signal.SIGSTOP)
            check(request, await answering)
            assert remote.placement.num_starts == 2

    run(main())


def test_a_drain_lets_requests_end_and_leaves_no_process(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, "build_slow") as remote:
            request = make_request("a long story", max_tokens=10)
            [answering] = await begin(remote, request)
            assert remote.placement.process is not None
            (engine,) = children(remote.placement.process.pid)
            await remote.client.drain(60.0)
            check(request, await answering)
            await until(lambda: not Path(f"/proc/{engine}").exists())

    run(main())


def test_an_engine_that_cannot_start_says_why(model_path: Path) -> None:
    async def main() -> None:
        remote = make_remote(model_path, "build_refusing")
        try:
            with pytest.raises(MemoryBudgetError, match="--max-model-len 7"):
                await remote.client.start()
        finally:
            await remote.placement.close()

    run(main())


def test_an_engine_that_dies_at_its_start_is_an_error_and_the_host_stays(model_path: Path) -> None:
    async def main() -> None:
        remote = make_remote(model_path, "nothing")
        try:
            with pytest.raises(ConfigError, match="cannot be loaded"):
                await remote.transport.open(remote.client._config)
            assert remote.placement.process is not None
        finally:
            await remote.placement.close()

    run(main())
