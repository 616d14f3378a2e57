"""llama.cpp's own routes: `/completion`, `/infill`, `/apply-template`, `/props`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloister import __version__
from cloister.policy.gate import Admission
from cloister.server.calls import call_of
from cloister.server.errors import error_object
from cloister.server.jobs import GenerationJob, Numbered, Tally, run_job
from cloister.server.llamacpp import CompletionWriter, LlamaJob, apply_template, describe_sampling, read_completion, read_infill
from cloister.server.parse import check_fields
from cloister.server.prompts import PromptReader
from cloister.server.route_table import RouteTable
from cloister.server.routes.tokens import tokenizer_info
from cloister.server.sampling import sampling_params
from cloister.server.schemas import GenerationBody
from cloister.server.state import ServerState, admission_of, json_response, state_of
from cloister.server.stream import Chunks, Ending, events, open_stream

router = RouteTable()

UNMARKED_END: Final = Ending(b"", lambda error: events([error_object(error)]))
"""The last event is marked as such; there is no `[DONE]`."""

Reader = Callable[[PromptReader, bytes, Admission], LlamaJob]


class TemplatedPrompt(msgspec.Struct, frozen=True):
    """Reply of /apply-template."""

    prompt: str


@router.post("/completion")
async def complete(request: Request) -> Response:
    """Continues a prompt, at once or as a stream."""
    return await _answer(request, read_completion)


@router.post("/infill")
async def infill(request: Request) -> Response:
    """Fills in the text between a prefix and a suffix."""
    return await _answer(request, read_infill)


@router.post("/apply-template")
async def template(request: Request) -> Response:
    """Returns a conversation rendered with the chat template."""
    state = state_of(request)
    return json_response(TemplatedPrompt(await state.off_the_loop(apply_template, state.reader, await request.body())))


@router.get("/props")
async def props(request: Request) -> Response:
    """Describes the served model."""
    return json_response(describe_props(state_of(request)))


def describe_props(state: ServerState) -> dict[str, Any]:
    """Returns the properties of the model, and its default sampling parameters."""
    reader, model = state.reader, state.reader.model
    own = sampling_params(check_fields({}, GenerationBody), model, max_tokens=None, vocab_size=reader.vocab_size)
    info = tokenizer_info(reader)
    return {
        "default_generation_settings": {"n_ctx": model.max_model_len, "params": describe_sampling(own)},
        "total_slots": 1,
        "model_alias": reader.model_name,
        "model_path": model.name,  # the path is not public
        "chat_template": reader.chat_format.template.source,
        "bos_token": info.bos_token or "",
        "eos_token": info.eos_token or "",
        "modalities": {"vision": reader.chat_format.takes_images, "audio": False},
        "build_info": f"cloister {__version__}",
    }


async def _answer(request: Request, read: Reader) -> Response:
    state = state_of(request)
    asked = await state.off_the_loop(read, state.reader, await request.body(), admission_of(request))
    writer = CompletionWriter(asked, call_of(request.scope))
    outputs = run_job(state.generate, asked.job)
    if asked.job.stream:
        return await open_stream(_stream(asked.job, writer, outputs), UNMARKED_END)
    tally = Tally(asked.job)
    async with aclosing(outputs):
        async for number, output in outputs:
            tally.add(number, output)
            writer.add(output)
    return json_response(writer.whole(tally.usage()))


async def _stream(job: GenerationJob, writer: CompletionWriter, outputs: AsyncGenerator[Numbered, None]) -> Chunks:
    """Yields events."""
    tally = Tally(job)
    async with aclosing(outputs):
        async for number, output in outputs:
            tally.add(number, output)
            if (event := writer.add(output)) is not None:
                yield events([event])
    yield events([writer.last(tally.usage())])
