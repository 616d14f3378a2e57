"""The engine behind an event loop of one's own, with the embedded model."""

import asyncio
import contextlib
import time

import pytest

from cloister import LLM, AsyncLLM, CloisterError, SamplingParams
from cloister.types.events import Ended, Progressed
from cloister.types.request import FinishReason
from tests.slow_engine import slow_down

PROMPTS = ["The CREATE INDEX command", "A decorator is a function that", "import"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "What is the Python module json?"}]


def run(ask, **settings):
    """Runs `ask(llm)` with a started LLM on a new event loop; nothing may take longer than a minute."""

    async def main():
        async with asyncio.timeout(300), AsyncLLM("cloister-5m", num_threads=1, **settings) as llm:
            return await ask(llm)

    return asyncio.run(main())


async def gather(stream):
    return [output async for output in stream]


def test_it_answers_as_the_plain_one_does():
    async def ask(llm):
        completions = await llm.generate(PROMPTS, GREEDY)
        chat = await llm.chat(MESSAGES, GREEDY)
        streams = await asyncio.gather(gather(llm.stream(PROMPTS[0], GREEDY)), gather(llm.stream_chat(MESSAGES, GREEDY)))
        vectors = await llm.embed(PROMPTS)
        return (
            [c.text for c in (*completions, chat)],
            ["".join(o.text for o in s) for s in streams],
            vectors,
            await llm.score("a", "b"),
        )

    texts, streamed, vectors, scores = run(ask)
    with LLM("cloister-5m", num_threads=1) as plain:
        assert texts == [c.text for c in (*plain.generate(PROMPTS, GREEDY), plain.chat(MESSAGES, GREEDY))]
        assert (vectors == plain.embed(PROMPTS)).all()
        assert scores == plain.score("a", "b")
    assert streamed == [texts[0], texts[3]]


def watch(llm):
    """Returns lists that fill: a mark for each token, and how requests ended."""
    tokens, ends = [], []

    def listen(event):
        tokens.extend([event] if isinstance(event, Progressed) else [])
        ends.extend([event.reason] if isinstance(event, Ended) else [])

    llm.subscribe(listen)
    return tokens, ends


async def until(condition):
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_cancelled_task_gives_its_requests_up(monkeypatch):
    slow_down(monkeypatch)

    async def ask(llm):
        tokens, ends = watch(llm)
        task = asyncio.create_task(llm.generate(PROMPTS, ENDLESS))
        await until(lambda: tokens)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: len(ends) == len(PROMPTS))
        return list(ends), (await llm.generate("x", GREEDY))[0].outputs[0].finish_reason

    assert run(ask) == ([FinishReason.ABORT] * len(PROMPTS), FinishReason.LENGTH)


def test_a_stream_that_is_closed_early_gives_its_request_up(monkeypatch):
    slow_down(monkeypatch)

    async def ask(llm):
        _, ends = watch(llm)
        stream = llm.stream(PROMPTS[0], ENDLESS)
        await anext(stream)
        await stream.aclose()
        await until(lambda: ends)
        return ends

    assert run(ask) == [FinishReason.ABORT]


def test_one_prompt_that_cannot_run_gives_the_others_up(monkeypatch):
    slow_down(monkeypatch)

    async def ask(llm):
        _, ends = watch(llm)
        with pytest.raises(CloisterError, match="9000 tokens"):
            await llm.generate([PROMPTS[0], [1] * 9000], ENDLESS)
        await until(lambda: len(ends) == 2)
        return set(ends)

    assert run(ask) == {FinishReason.REJECTED, FinishReason.ABORT}


def test_closing_ends_what_runs_within_its_deadline(monkeypatch):
    slow_down(monkeypatch)

    async def main():
        llm = AsyncLLM("cloister-5m", num_threads=1)
        await llm.start()
        tokens, _ = watch(llm)
        task = asyncio.create_task(llm.generate(PROMPTS, ENDLESS))
        await until(lambda: tokens)
        start_s = time.monotonic()
        await llm.close(timeout_s=0.2)
        await llm.close()
        elapsed_s = time.monotonic() - start_s
        with pytest.raises(CloisterError):
            await task
        with pytest.raises(CloisterError, match="was closed"):
            await llm.generate("x")
        return elapsed_s

    assert 0.2 <= asyncio.run(main()) < 60


def test_before_it_was_started_it_says_so():
    async def main():
        with pytest.raises(CloisterError, match="was not started"):
            await AsyncLLM("cloister-5m", num_threads=1).generate("x")

    asyncio.run(main())


def test_many_more_prompts_than_may_wait_are_all_answered():
    async def ask(llm):
        return await llm.generate(["x"] * 40, SamplingParams(max_tokens=2, ignore_eos=True))

    assert len(run(ask, max_waiting=1, max_num_seqs=2)) == 40


def test_an_answer_ends_where_nobody_says_how_long_it_may_be():
    endless = SamplingParams(temperature=0, ignore_eos=True)

    async def ask(llm):
        completions = await llm.generate(PROMPTS[:2], [endless, SamplingParams(temperature=0, ignore_eos=True, min_tokens=40)])
        streamed = await gather(llm.stream(PROMPTS[0], endless))
        return [len(c.outputs[0].token_ids) for c in completions], sum(len(o.token_ids) for o in streamed)

    assert run(ask, default_max_tokens=30) == ([30, 40], 30)
    assert AsyncLLM("cloister-5m", num_threads=1)._config.default_max_tokens == 2048


def test_zero_is_no_limit_but_the_window():
    async def ask(llm):
        (completion,) = await llm.generate("a", SamplingParams(temperature=0, ignore_eos=True))
        return len(completion.prompt_token_ids) + len(completion.outputs[0].token_ids)

    assert run(ask, default_max_tokens=0, max_model_len=80) == 80
