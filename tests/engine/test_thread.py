"""The engine in a thread, as an event loop uses it; `LLM` is tested in tests/e2e."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cloister.engine import EngineClient, EngineCore, Health, ThreadTransport
from cloister.types.errors import EngineError, InvalidRequestError
from cloister.types.request import FinishReason, Request, SequenceOutput
from cloister.types.step import StepPlan
from tests.engine.replica import VOCAB_SIZE, SteppedRunner, make_config, make_replica, make_request
from tests.history_program import greedy_continuation

DEADLINE_S = 300.0


def token_ids(outputs: list[SequenceOutput]) -> list[int]:
    return [i for output in outputs for i in output.token_ids]


async def answer(engine: EngineClient, request: Request) -> list[SequenceOutput]:
    return [output async for output in engine.generate(request)]


def run(core: EngineCore, model_path: Path, work: Callable[[EngineClient], Awaitable[None]], **settings: object) -> None:
    """Does some work with an engine, under a deadline."""

    async def main() -> None:
        engine = EngineClient(ThreadTransport(core), make_config(model_path, **settings))
        await engine.start()
        await work(engine)
        await engine.drain(5.0)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_requests_side_by_side_get_their_own_answers(model_path: Path) -> None:
    async def work(engine: EngineClient) -> None:
        assert engine.health().good
        requests = [make_request(f"{i}", max_tokens=1 + i % 7) for i in range(50)]
        for request, outputs in zip(requests, await asyncio.gather(*(answer(engine, r) for r in requests)), strict=True):
            assert token_ids(outputs) == greedy_continuation(request.token_ids, request.sampling.max_tokens or 0, VOCAB_SIZE)
            assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]

    run(make_replica(model_path).core, model_path, work)


def test_following_gives_the_same_outputs_as_generating(model_path: Path) -> None:
    async def work(engine: EngineClient) -> None:
        requests = [make_request(f"{i % 5}", max_tokens=1 + i % 7, n=1 + i % 3) for i in range(30)]
        followed: dict[str, list[SequenceOutput]] = {request.request_id: [] for request in requests}
        await asyncio.gather(*(engine.follow(r, followed[r.request_id].append) for r in requests))
        for request in requests:
            again = make_request(request.token_ids, max_tokens=request.sampling.max_tokens, n=request.sampling.n)
            generated = await answer(engine, again)
            for index in range(request.sampling.n):
                pieces = [output for output in followed[request.request_id] if output.index == index]
                assert len(pieces) == request.sampling.max_tokens, "a follower gets each step's output by itself"
                assert _whole(pieces) == _whole([output for output in generated if output.index == index])

    run(make_replica(model_path).core, model_path, work)


def _whole(pieces: list[SequenceOutput]) -> tuple[str, list[int], list[str], int]:
    """Returns all of an answer: its pieces may be joined where a task was slow to read them."""
    reasons = [str(each.finish_reason) for each in pieces if each.finish_reason is not None]
    return "".join(each.text for each in pieces), token_ids(pieces), reasons, pieces[-1].num_output_tokens


def test_a_follower_that_fails_ends_its_request_and_no_other(model_path: Path) -> None:
    async def work(engine: EngineClient) -> None:
        def fail(output: SequenceOutput) -> None:
            if output.num_output_tokens == 3:
                raise ZeroDivisionError

        other: list[SequenceOutput] = []
        beside = asyncio.create_task(engine.follow(make_request(max_tokens=20), other.append))
        with pytest.raises(ZeroDivisionError):
            await engine.follow(make_request(max_tokens=200), fail)
        await beside
        assert len(token_ids(other)) == 20
        assert (await _until_idle(engine)).good

    run(make_replica(model_path).core, model_path, work)


async def _until_idle(engine: EngineClient) -> Health:
    while "0 requests in flight" not in engine.health().detail:
        await asyncio.sleep(0.01)
    return engine.health()


def test_one_that_is_left_early_leaves_a_working_engine(model_path: Path) -> None:
    async def work(engine: EngineClient) -> None:
        outputs = engine.generate(make_request(max_tokens=200))
        await anext(outputs)
        await outputs.aclose()
        assert token_ids(await answer(engine, make_request("after", max_tokens=5)))

    run(make_replica(model_path).core, model_path, work)


def test_an_invalid_request_harms_no_later_one(model_path: Path) -> None:
    async def work(engine: EngineClient) -> None:
        with pytest.raises(InvalidRequestError):
            await answer(engine, make_request(n=0))
        assert (await answer(engine, make_request()))[-1].finish_reason is FinishReason.LENGTH

    run(make_replica(model_path).core, model_path, work)


def test_a_drained_engine_refuses(model_path: Path) -> None:
    async def work(engine: EngineClient) -> None:
        await engine.drain(5.0)
        assert not engine.health().good
        with pytest.raises(EngineError, match="shutting down"):
            await answer(engine, make_request())

    run(make_replica(model_path).core, model_path, work)


def test_an_engine_that_was_not_started_says_so(model_path: Path) -> None:
    async def main() -> None:
        engine = EngineClient(ThreadTransport(make_replica(model_path).core), make_config(model_path))
        with pytest.raises(EngineError, match="not been started"):
            await answer(engine, make_request())

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_an_engine_that_gives_up_ends_every_request(model_path: Path) -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError

    async def work(engine: EngineClient) -> None:
        answers = await asyncio.gather(*(answer(engine, make_request()) for _ in range(6)))
        assert [outputs[-1].finish_reason for outputs in answers] == [FinishReason.ERROR] * 6
        assert not engine.health().good
        with pytest.raises(EngineError, match="load it again"):
            await answer(engine, make_request())

    core = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=fail), max_num_seqs=1).core
    run(core, model_path, work, max_num_seqs=1)
