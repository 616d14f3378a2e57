"""Jobs on the engine: one HTTP request as one engine request per prompt, run concurrently, with one output stream; token counts
and times come from the engine's events (the source of all metrics)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from cloister.engine.in_flight import EngineStats
from cloister.policy.gate import Admission
from cloister.server.answers import CachedTokens, Echo, ReasoningTokens, Usage
from cloister.server.calls import HttpCall
from cloister.server.errors import TOO_LATE, failure_of
from cloister.text.answer_parser import AnswerForm
from cloister.types.documents import Documents
from cloister.types.errors import DeadlineError
from cloister.types.images import ImageTile
from cloister.types.request import FinishReason, ModelInfo, PoolingParams, Request, SamplingParams, SequenceOutput

# A generation job: one HTTP request as engine requests, one per prompt, with the data for the reply.


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """The parsed request of a completion route.

    Attributes:
        job_id: random; also the prefix of its requests' ids.
        requests: one per prompt; sequence `index` of prompt `i` is choice `i * n + index`.
        model_name: the model's name for clients.
        fingerprint: of the weights that were served when it was read, and of the adapter.
        engine_stats: statistics from engines about its requests so far, by their ids (`HttpCall.engine_stats`).
        echoes: one per prompt if the reply repeats it, else none.
        answerless: only the prompt's log-probabilities are needed (`max_tokens` 0 with `echo`).
        form: what an answer may contain besides text; None for nothing.
        continuous_usage: every chunk of a stream has the counts so far.
        num_kept: number of answers of each prompt in the reply, the most likely ones by mean log-probability; None for all.
        shows_logprobs: the client requested log-probabilities.
    """

    job_id: str
    requests: tuple[Request, ...]
    model_name: str
    fingerprint: str
    stream: bool
    include_usage: bool
    echoes: tuple[Echo, ...] = ()
    answerless: bool = False
    form: AnswerForm | None = field(default=None, repr=False)
    continuous_usage: bool = False
    num_kept: int | None = None
    shows_logprobs: bool = True
    engine_stats: Mapping[str, EngineStats] = field(default_factory=dict, repr=False)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def n(self) -> int:
        """Sequences per prompt."""
        return self.requests[0].sampling.n

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.n

    @property
    def system_fingerprint(self) -> str:
        """Identifies the weights that compute the reply, and the adapter; several if a rolling update fell between its
        prompts."""
        found = [self.engine_stats.get(request.request_id) for request in self.requests]
        weights = dict.fromkeys(stats.fingerprint for stats in found if stats is not None and stats.fingerprint)
        adapter = self.requests[0].adapter
        return " ".join(name_weights(each, adapter) for each in weights) or self.fingerprint

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)


def make_job(
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    admission: Admission,
    model: ModelInfo,
    *,
    prefix: str,
    model_name: str,
    timeout_s: float,
    stream: bool,
    include_usage: bool,
    echoes: tuple[Echo, ...] = (),
    answerless: bool = False,
    form: AnswerForm | None = None,
    continuous_usage: bool = False,
    num_kept: int | None = None,
    shows_logprobs: bool = True,
    pooling: PoolingParams | Sequence[PoolingParams] | None = None,
    adapter: str | None = None,
    images: tuple[ImageTile, ...] = (),
    documents: Documents | None = None,
) -> GenerationJob:
    """Returns a job for tokenized prompts.

    Args:
        prefix: prefix of the id, such as "chatcmpl".
        timeout_s: deadline of every request of the job, in the engine.
        pooling: pooling of the prompts to vectors: one for all, or one each.
        adapter: digest of the adapter to use.
        images: images of the only prompt.
        documents: parts of the only prompt that are encoded separately.
    """
    job_id = f"{prefix}-{secrets.token_hex(12)}"
    ways = pooling if isinstance(pooling, Sequence) else [pooling] * len(prompts)
    requests = tuple(
        Request(
            request_id=f"{job_id}-{i}",
            token_ids=prompt,
            sampling=sampling,
            scope=admission.scope,
            tenant=admission.tenant,
            priority=admission.priority,
            timeout_s=timeout_s,
            pooling=way,
            adapter=adapter,
            images=images,
            documents=documents,
            cache_key=admission.cache_key,
        )
        for i, (prompt, way) in enumerate(zip(prompts, ways, strict=True))
    )
    return GenerationJob(
        job_id=job_id,
        requests=requests,
        model_name=model_name,
        fingerprint=name_weights(model.fingerprint, adapter),
        stream=stream,
        include_usage=include_usage,
        echoes=echoes,
        answerless=answerless,
        form=form,
        continuous_usage=continuous_usage,
        num_kept=num_kept,
        shows_logprobs=shows_logprobs,
    )


def name_weights(fingerprint: str, adapter: str | None) -> str:
    """Returns the `system_fingerprint` of weights with an adapter, whose digest is given."""
    return fingerprint if adapter is None else f"{fingerprint}-{adapter[:16]}"


MAX_PUMPED: Final = 64
"""Limit on outputs of several prompts that wait for the reply together; further ones wait where they are counted."""
MAX_SIDE_BY_SIDE: Final = 64
"""Maximum concurrent requests of one job; thousands of texts for pooling must not fill the engine's queue."""


class Generate(Protocol):
    """Submits one request to the engine (`ServerState.generate`)."""

    def __call__(self, request: Request, /, *, in_batches: bool) -> AsyncGenerator[SequenceOutput, None]: ...


Numbered = tuple[int, SequenceOutput]
"""(index of the prompt in its job, output)"""


async def run_job(generate: Generate, job: GenerationJob) -> AsyncGenerator[Numbered, None]:
    """Yields the outputs of the job's sequences. Closing it early aborts every request of the job.

    Each request gets the job's remaining time as its timeout, which the engine enforces.

    Raises:
        CloisterError: a request was refused, or a sequence ended without an answer; the others are aborted.
    """
    if len(job.requests) == 1:  # the usual case needs no task and no queue
        async with aclosing(generate(job.requests[0], in_batches=not job.stream)) as outputs:
            async for output in outputs:
                yield 0, output if output.finish_reason is None and not job.answerless else _checked(job, output)
                if output.logprobs:
                    await asyncio.sleep(0)  # they take long to write, and several outputs may wait: other tasks get a turn
    else:
        async with aclosing(_side_by_side(generate, job)) as numbered:
            async for number, output in numbered:
                yield number, _checked(job, output)
                if output.logprobs:
                    await asyncio.sleep(0)


def _checked(job: GenerationJob, output: SequenceOutput) -> SequenceOutput:
    if (failure := failure_of(output)) is not None:
        raise failure
    return _without_answer(output) if job.answerless else output


async def _side_by_side(generate: Generate, job: GenerationJob) -> AsyncGenerator[Numbered, None]:
    requests, in_batches = job.requests, not job.stream
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(MAX_PUMPED)
    room = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
    due_s = asyncio.get_running_loop().time() + requests[0].timeout_s
    tasks = [
        asyncio.create_task(_pump(generate, request, i, queue, room, due_s, in_batches=in_batches))
        for i, request in enumerate(requests)
    ]
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
    *,
    in_batches: bool,
) -> None:
    try:
        async with room:
            left_s = due_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise DeadlineError(TOO_LATE)
            async with aclosing(generate(msgspec.structs.replace(request, timeout_s=left_s), in_batches=in_batches)) as outputs:
                async for output in outputs:
                    await queue.put((number, output))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


def _without_answer(output: SequenceOutput) -> SequenceOutput:
    reason = FinishReason.LENGTH if output.finish_reason is not None else None
    return msgspec.structs.replace(output, text="", token_ids=[], logprobs=[], finish_reason=reason)


class Tally:
    """Counts the tokens of a job from its outputs."""

    def __init__(self, job: GenerationJob) -> None:
        self._num_prompt_tokens = job.num_prompt_tokens
        self._num_document_tokens = sum(r.documents.num_tokens for r in job.requests if r.documents is not None)
        self._num_cached = [0] * len(job.requests)
        self._num_output_tokens = 0
        self._num_reasoning_tokens = 0

    def add(self, number: int, output: SequenceOutput) -> None:
        """Counts one output of prompt `number`."""
        self._num_cached[number] = max(self._num_cached[number], output.num_cached_tokens)
        self._num_output_tokens += len(output.token_ids)

    def add_reasoning(self, num_tokens: int) -> None:
        """Counts already counted tokens as reasoning."""
        self._num_reasoning_tokens += num_tokens

    def usage(self) -> Usage:
        """The counts so far, in the format of the API."""
        return Usage(
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._num_prompt_tokens + self._num_output_tokens,
            CachedTokens(sum(self._num_cached), self._num_document_tokens),
            ReasoningTokens(self._num_reasoning_tokens),
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in seconds, None if unknown. The rest of `total_s` was spent waiting.

    Attributes:
        total_s: since the request's head arrived.
        load_s: from there until the engine had the prompt: body, model switch, template, tokens.
        prompt_s: from the first slot to the first token.
        answer_s: from the first token to the end.
    """

    total_s: float | None = None
    load_s: float | None = None
    prompt_s: float | None = None
    answer_s: float | None = None


def read_timings(call: HttpCall | None, job: GenerationJob) -> Timings:
    """Returns the times of a finished job; for several prompts, only the first two fields."""
    if call is None:
        return Timings()
    engine_stats = [stats for request in job.requests if (stats := call.engine_stats.get(request.request_id)) is not None]
    arrivals = [stats.arrival_s for stats in engine_stats if stats.arrival_s is not None]
    total_s, load_s = time.monotonic() - call.began_s, _between(call.began_s, min(arrivals, default=None))
    if len(engine_stats) != 1:
        return Timings(total_s, load_s)
    (stats,) = engine_stats
    return Timings(
        total_s, load_s, _between(stats.scheduled_s, stats.first_token_s), _between(stats.first_token_s, stats.ended_s)
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
