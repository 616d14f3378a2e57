"""A job on the engine: its requests run side by side, and their outputs come as one stream with one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final

import msgspec

from cloister.engine.base import AsyncEngine
from cloister.server.answers import CachedTokens, ReasoningTokens, Usage
from cloister.server.deadline import Deadline
from cloister.server.errors import failure_of
from cloister.server.job import GenerationJob
from cloister.types.errors import DeadlineError
from cloister.types.request import FinishReason, Request, SequenceOutput

GRACE_S: Final = 15.0
"""How much longer than a request's own deadline the front waits, so that the word of the engine's own end comes first."""
MAX_SIDE_BY_SIDE: Final = 64
"""Requests of one job that the engine holds at once; thousands of texts to be pooled must not fill its queue."""

Numbered = tuple[int, SequenceOutput]
"""(number of the prompt in its job, output)"""


async def run_job(engine: AsyncEngine, job: GenerationJob) -> AsyncGenerator[Numbered, None]:
    """Yields what the job's sequences gain. Closing it early aborts every request of the job.

    Raises:
        CloisterError: a request was refused, or a sequence ended without an answer; the others are aborted.
    """
    deadline = Deadline(job.requests[0].timeout_s + GRACE_S)
    try:
        async with aclosing(_side_by_side(engine, job.requests)) as outputs:
            while (numbered := await _next(outputs, deadline)) is not None:
                if numbered[1].finish_reason is not None and (failure := failure_of(numbered[1])) is not None:
                    raise failure
                yield (numbered[0], _without_answer(numbered[1])) if job.answerless else numbered
    finally:
        deadline.close()


async def _next(outputs: AsyncIterator[Numbered], deadline: Deadline) -> Numbered | None:
    try:
        with deadline:
            return await anext(outputs, None)
    except TimeoutError:
        raise DeadlineError("The answer was not complete in time; ask for fewer tokens or try again.") from None


async def _side_by_side(engine: AsyncEngine, requests: tuple[Request, ...]) -> AsyncGenerator[Numbered, None]:
    if len(requests) == 1:  # the usual case needs no task and no queue
        async with aclosing(engine.generate(requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue()
    room = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
    tasks = [asyncio.create_task(_pump(engine, request, i, queue, room)) for i, request in enumerate(requests)]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    engine: AsyncEngine,
    request: Request,
    number: int,
    queue: asyncio.Queue[Numbered | Exception | None],
    room: asyncio.Semaphore,
) -> None:
    try:
        async with room, aclosing(engine.generate(request)) as outputs:
            async for output in outputs:
                queue.put_nowait((number, output))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)


def _without_answer(output: SequenceOutput) -> SequenceOutput:
    reason = FinishReason.LENGTH if output.finish_reason is not None else None
    return msgspec.structs.replace(output, text="", token_ids=[], logprobs=[], finish_reason=reason)


class Tally:
    """Counts the tokens of a job as its outputs pass."""

    def __init__(self, job: GenerationJob) -> None:
        self._num_prompt_tokens = job.num_prompt_tokens
        self._num_cached = [0] * len(job.requests)
        self._num_output_tokens = 0
        self._num_reasoning_tokens = 0

    def add(self, number: int, output: SequenceOutput) -> None:
        """Counts one output of prompt `number`."""
        self._num_cached[number] = max(self._num_cached[number], output.num_cached_tokens)
        self._num_output_tokens += len(output.token_ids)

    def add_reasoning(self, num_tokens: int) -> None:
        """Counts tokens, counted already, that were reasoning."""
        self._num_reasoning_tokens += num_tokens

    def usage(self) -> Usage:
        """The counts so far, as the API shows them."""
        return Usage(
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._num_prompt_tokens + self._num_output_tokens,
            CachedTokens(sum(self._num_cached)),
            ReasoningTokens(self._num_reasoning_tokens),
        )
