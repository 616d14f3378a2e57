"""A job on the engine: its requests run side by side, and their outputs come as one stream with one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import msgspec

from cloister.server.answers import CachedTokens, ReasoningTokens, Usage
from cloister.server.errors import TOO_LATE, failure_of
from cloister.server.job import GenerationJob
from cloister.types.errors import DeadlineError
from cloister.types.request import FinishReason, Request, SequenceOutput

MAX_SIDE_BY_SIDE: Final = 64
"""Requests of one job that the engine holds at once; thousands of texts to be pooled must not fill its queue."""

Generate = Callable[[Request], AsyncGenerator[SequenceOutput, None]]
"""Has the engine do one request (`ServerState.generate`)."""
Numbered = tuple[int, SequenceOutput]
"""(number of the prompt in its job, output)"""


async def run_job(generate: Generate, job: GenerationJob) -> AsyncGenerator[Numbered, None]:
    """Yields what the job's sequences gain. Closing it early aborts every request of the job.

    Each request has what is left of the job's time when it is submitted; the engine ends it then.

    Raises:
        CloisterError: a request was refused, or a sequence ended without an answer; the others are aborted.
    """
    async with aclosing(_side_by_side(generate, job.requests)) as outputs:
        async for number, output in outputs:
            if output.finish_reason is not None and (failure := failure_of(output)) is not None:
                raise failure
            yield number, _without_answer(output) if job.answerless else output


async def _side_by_side(generate: Generate, requests: tuple[Request, ...]) -> AsyncGenerator[Numbered, None]:
    if len(requests) == 1:  # the usual case needs no task and no queue
        async with aclosing(generate(requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue()
    room = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
    due_s = asyncio.get_running_loop().time() + requests[0].timeout_s
    tasks = [asyncio.create_task(_pump(generate, request, i, queue, room, due_s)) for i, request in enumerate(requests)]
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
    generate: Generate,
    request: Request,
    number: int,
    queue: asyncio.Queue[Numbered | Exception | None],
    room: asyncio.Semaphore,
    due_s: float,
) -> None:
    try:
        async with room:
            left_s = due_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise DeadlineError(TOO_LATE)
            async with aclosing(generate(msgspec.structs.replace(request, timeout_s=left_s))) as outputs:
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
