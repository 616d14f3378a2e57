"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.answers import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionDelta,
    ToolCallAnswer,
    ToolCallDelta,
    Usage,
    chat_logprobs,
)
from cloister.server.choices import Turn, make_call_id, read_turns
from cloister.server.jobs import GenerationJob, Numbered, Tally, run_job
from cloister.server.route_table import RouteTable
from cloister.server.state import admission_of, json_response, state_of
from cloister.server.stream import Chunks, EventTemplate, events, open_stream
from cloister.text.parts import Arguments, CallBegun, CallBroken, CallEnded, ParsedOutput, Part, Reasoning, Text
from cloister.types.request import SequenceOutput

router = RouteTable()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, at once or as a stream."""
    state = state_of(request)
    job = state.follow(await state.read(state.reader.read_chat, await request.body(), admission_of(request)))
    outputs = run_job(state.generate, job)
    if job.stream:
        return await open_stream(stream_chat(job, outputs))
    return json_response(await answer_chat(job, outputs))


async def answer_chat(job: GenerationJob, outputs: AsyncGenerator[Numbered, None]) -> ChatCompletion:
    """Returns the whole reply."""
    wants_logprobs = job.requests[0].sampling.logprobs is not None
    logprobs = [ChatLogprobs([]) if wants_logprobs else None for _ in range(job.num_choices)]
    answers = [ParsedOutput() for _ in logprobs]
    reasons = [""] * len(logprobs)
    tally = Tally(job)
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            if turn.output.logprobs and (written := logprobs[turn.index]) is not None:
                written.content.extend(chat_logprobs(turn.output.logprobs).content)
            answers[turn.index].add(turn.parts)
            reasons[turn.index] = turn.finish_reason or ""
    return ChatCompletion(
        id=job.job_id,
        created=job.created_s,
        model=job.model_name,
        system_fingerprint=job.system_fingerprint,
        choices=[
            ChatChoice(
                index=i,
                message=_message(answers[i]),
                finish_reason=reasons[i],
                logprobs=logprobs[i],
            )
            for i in range(job.num_choices)
        ],
        usage=tally.usage(),
    )


def _message(answer: ParsedOutput) -> ChatMessage:
    calls = [ToolCallAnswer(make_call_id(), CalledFunction(c.name, c.arguments)) for c in answer.calls.values()]
    reasoning = answer.reasoning or UNSET
    return ChatMessage(
        content=answer.text or (None if calls else ""),
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=calls or UNSET,
    )


async def stream_chat(job: GenerationJob, outputs: AsyncGenerator[Numbered, None]) -> Chunks:
    """Yields events: the role first, then deltas, the finish reason alone, and last the usage if requested."""
    tally = Tally(job)
    write = _write_text(job, outputs, tally) if job.form is None else _write_turns(job, outputs, tally)
    async with aclosing(write) as chunks:
        async for chunk in chunks:
            yield chunk
    if job.include_usage:
        yield events([_chunk(job, [], tally.usage())])


async def _write_text(job: GenerationJob, outputs: AsyncGenerator[Numbered, None], tally: Tally) -> Chunks:
    """Writes text-only answers: most tokens only fill in a template."""
    templates: dict[int, EventTemplate] = {}
    async with aclosing(outputs):
        async for number, output in outputs:
            tally.add(number, output)
            template = templates.get(output.index)
            is_text = output.finish_reason is None and output.logprobs is None and not job.continuous_usage
            if template is not None and is_text:
                if output.text:
                    yield template.fill(output.text)
                continue
            choices = _gained(output)
            if template is None:
                templates[output.index] = EventTemplate(partial(_text_chunk, job, output.index))
                choices.insert(0, _first_choice(job, output.index))
            if choices:
                yield _events(job, choices, tally)


async def _write_turns(job: GenerationJob, outputs: AsyncGenerator[Numbered, None], tally: Tally) -> Chunks:
    """Writes answers that may contain reasoning and calls."""
    templates: dict[int, EventTemplate] = {}
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            template = templates.get(turn.index)
            text = None if turn.output.logprobs is not None or job.continuous_usage else turn.only_text
            if template is not None and text is not None:
                yield template.fill(text)
                continue
            choices = _parted(turn)
            if template is None:
                templates[turn.index] = EventTemplate(partial(_text_chunk, job, turn.index))
                choices.insert(0, _first_choice(job, turn.index))
            if choices:
                yield _events(job, choices, tally)


def _first_choice(job: GenerationJob, index: int) -> ChatChunkChoice:
    """The role. Clients that request log-probabilities expect a list of them in every chunk but the last."""
    logprobs = ChatLogprobs([]) if job.requests[0].sampling.logprobs is not None else None
    return ChatChunkChoice(index, ChatDelta("assistant", ""), logprobs)


def _parted(turn: Turn) -> list[ChatChunkChoice]:
    deltas = [delta for part in turn.parts if (delta := _delta(part)) is not None]
    logprobs = chat_logprobs(turn.output.logprobs) if turn.output.logprobs is not None else None
    if turn.output.logprobs and not deltas:
        deltas = [ChatDelta(content="")]
    others = ChatLogprobs([]) if logprobs is not None else None
    choices = [ChatChunkChoice(turn.index, delta, logprobs if i == 0 else others) for i, delta in enumerate(deltas)]
    if turn.finish_reason is not None:
        choices.append(ChatChunkChoice(turn.index, ChatDelta(), finish_reason=turn.finish_reason))
    return choices


def _delta(part: Part) -> ChatDelta | None:
    match part:
        case Text(text) | CallBroken(_, text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case CallBegun(index, name):
            call = ToolCallDelta(index, FunctionDelta("", name), make_call_id(), "function")
            return ChatDelta(tool_calls=[call])
        case Arguments(index, text):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))])
        case CallEnded():
            return None


def _gained(output: SequenceOutput) -> list[ChatChunkChoice]:
    choices = []
    if output.text or output.logprobs:
        logprobs = chat_logprobs(output.logprobs) if output.logprobs is not None else None
        choices.append(ChatChunkChoice(output.index, ChatDelta(content=output.text), logprobs))
    if output.finish_reason is not None:
        choices.append(ChatChunkChoice(output.index, ChatDelta(), finish_reason=output.finish_reason.value))
    return choices


def _text_chunk(job: GenerationJob, index: int, text: str) -> ChatChunk:
    return _chunk(job, [ChatChunkChoice(index, ChatDelta(content=text))])


def _events(job: GenerationJob, choices: list[ChatChunkChoice], tally: Tally) -> bytes:
    usage = tally.usage() if job.continuous_usage else None
    return events(_chunk(job, [choice], usage) for choice in choices)


def _chunk(job: GenerationJob, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
    return ChatChunk(
        id=job.job_id,
        created=job.created_s,
        model=job.model_name,
        system_fingerprint=job.system_fingerprint,
        choices=choices,
        usage=usage if job.include_usage else UNSET,
    )
