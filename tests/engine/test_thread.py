"""The engine in a thread: blocking for `LLM`, asynchronous for a program with an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.engine import ThreadEngine
from cloister.types.errors import EngineError, InvalidRequestError
from cloister.types.request import FinishReason, Request, SequenceOutput
from cloister.types.step import StepPlan
from tests.engine.replica import VOCAB_SIZE, SteppedRunner, make_config, make_replica, make_request
from tests.history_program import greedy_continuation

DEADLINE_S = 20.0


@pytest.fixture
def engine(model_path: Path) -> Iterator[ThreadEngine]:
    engine = ThreadEngine(make_replica(model_path).core, make_config(model_path, max_waiting=8))
    yield engine
    engine.close()


def token_ids(outputs: list[SequenceOutput]) -> list[int]:
    return [i for output in outputs for i in output.token_ids]


def test_a_batch_comes_back_in_order_whatever_its_size(engine: ThreadEngine) -> None:
    requests = [make_request(f"prompt {i}", max_tokens=1 + i % 7) for i in range(100)]
    progress: list[tuple[int, int]] = []
    answers = engine.generate_all(requests, lambda *counts: progress.append(counts))
    for request, outputs in zip(requests, answers, strict=True):
        assert token_ids(outputs) == greedy_continuation(request.token_ids, request.sampling.max_tokens or 0, VOCAB_SIZE)
        assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
    assert progress == [(i, 100) for i in range(1, 101)]


def test_nothing_to_do_is_done_at_once(engine: ThreadEngine) -> None:
    assert engine.generate_all([]) == []


def test_batches_from_two_threads_do_not_mix(engine: ThreadEngine) -> None:
    answers: dict[str, list[int]] = {}

    def ask(word: str) -> None:
        answers[word] = token_ids(engine.generate_all([make_request(word, max_tokens=9)])[0])

    threads = [threading.Thread(target=ask, args=(word,)) for word in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert answers == {w: greedy_continuation(list(w.encode()), 9, VOCAB_SIZE) for w in ("one", "two", "three")}


def test_an_interrupt_leaves_a_working_engine(engine: ThreadEngine) -> None:
    def interrupt(num_ended: int, num_all: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate_all([make_request(max_tokens=1), make_request(max_tokens=200)], interrupt)
    request = make_request("after", max_tokens=5)
    assert token_ids(engine.generate_all([request])[0]) == greedy_continuation(request.token_ids, 5, VOCAB_SIZE)


def test_an_invalid_request_in_a_batch_harms_no_later_one(engine: ThreadEngine) -> None:
    with pytest.raises(InvalidRequestError):
        engine.generate_all([make_request(), make_request(n=0)])
    assert engine.generate_all([make_request()])[0][-1].finish_reason is FinishReason.LENGTH


def test_a_closed_engine_refuses(engine: ThreadEngine) -> None:
    engine.generate_all([make_request()])
    engine.close()
    with pytest.raises(EngineError, match="shutting down"):
        engine.generate_all([make_request()])


def test_an_engine_that_gives_up_ends_every_request(model_path: Path) -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError

    core = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=fail), max_num_seqs=1).core
    engine = ThreadEngine(core, make_config(model_path, max_num_seqs=1))
    answers = engine.generate_all([make_request() for _ in range(6)])
    assert [outputs[-1].finish_reason for outputs in answers] == [FinishReason.ERROR] * 6
    assert not engine.health().good
    with pytest.raises(EngineError, match="load it again"):
        engine.generate_all([make_request()])


def test_an_event_loop_can_use_it(model_path: Path) -> None:
    async def answer(engine: ThreadEngine, request: Request) -> list[SequenceOutput]:
        return [output async for output in engine.generate(request)]

    async def main() -> None:
        engine = ThreadEngine(make_replica(model_path).core, make_config(model_path))
        await engine.start()
        assert engine.health().good
        requests = [make_request(f"{i}", max_tokens=10) for i in range(20)]
        for request, outputs in zip(requests, await asyncio.gather(*(answer(engine, r) for r in requests)), strict=True):
            assert token_ids(outputs) == greedy_continuation(request.token_ids, 10, VOCAB_SIZE)
        with pytest.raises(EngineError, match="event loop"):
            engine.generate_all(requests)
        await engine.drain(5.0)
        assert not engine.health().good
        with pytest.raises(EngineError, match="shutting down"):
            await answer(engine, make_request())

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
