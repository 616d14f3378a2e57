"""Log-probabilities of long replies: others have turns while they are written, and there is a most that a reply has of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from cloister.server.answers import Echo
from cloister.server.jobs import GenerationJob, make_job, run_job
from cloister.server.routes.chat import answer_chat
from cloister.server.routes.completions import answer_completion
from cloister.server.sampling import MAX_REPLY_LOGPROBS, bound_logprobs
from cloister.types.errors import InvalidRequestError
from cloister.types.request import FinishReason, Request, SamplingParams, SequenceOutput, TokenLogprobs
from tests.server.running_server import INFO, RunningServer, make_gate, output
from tests.server.test_bad_input import check_error

Answer = Callable[[GenerationJob, AsyncGenerator[tuple[int, SequenceOutput], None]], Awaitable[Any]]

NUM_OUTPUTS, NUM_EACH = 40, 8
ENTRY = TokenLogprobs(token_id=97, logprob=-0.5, top=((97, -0.5), (98, -1.5)), text=b"a", top_texts=(b"a", b"\xc3"))


def job_of(*, echoes: tuple[Echo, ...] = ()) -> GenerationJob:
    sampling = SamplingParams(n=2, logprobs=2, prompt_logprobs=2 if echoes else None)
    return make_job(
        [[1, 2]], sampling, make_gate().admit(None), INFO, prefix="t", model_name="t", timeout_s=10.0, stream=False,
        include_usage=False, echoes=echoes,
    )  # fmt: skip


async def answer_at_once(request: Request, *, in_batches: bool) -> AsyncGenerator[SequenceOutput, None]:
    """An engine whose outputs are all there when the first one is read."""
    prompt = [None, *[ENTRY] * 400] if request.sampling.prompt_logprobs is not None else None
    yield output(request, prompt_logprobs=prompt)
    for _ in range(NUM_OUTPUTS):
        for index in range(2):
            yield output(request, "a" * NUM_EACH, index=index, logprobs=[ENTRY] * NUM_EACH)
    for index in range(2):
        yield output(request, index=index, end=FinishReason.LENGTH)


def answer(write: Answer, job: GenerationJob) -> tuple[Any, int]:
    """Returns the reply, and how many turns another task had meanwhile."""

    async def measure() -> tuple[Any, int]:
        num_turns = 0

        async def go_on() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(go_on())
        reply = await write(job, run_job(answer_at_once, job))
        other.cancel()
        return json.loads(msgspec.json.encode(reply)), num_turns

    return asyncio.run(measure())


@pytest.mark.parametrize("write", [answer_chat, answer_completion])
def test_others_have_a_turn_after_each_piece_of_a_whole_reply(write: Answer) -> None:
    reply, num_turns = answer(write, job_of())
    assert num_turns >= 2 * NUM_OUTPUTS
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]


def test_a_whole_chat_has_every_position() -> None:
    reply, _ = answer(answer_chat, job_of())
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "\ufffd", "logprob": -1.5, "bytes": [195]}]
    position = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top}
    for choice in reply["choices"]:
        assert choice["logprobs"]["content"] == [position] * (NUM_OUTPUTS * NUM_EACH)


def test_others_have_turns_while_the_prompt_is_written_and_each_choice_has_it() -> None:
    reply, num_turns = answer(answer_completion, job_of(echoes=(Echo("a" * 401, b"a"),)))
    assert num_turns >= 2 * NUM_OUTPUTS + 400 // 64
    for choice in reply["choices"]:
        found = choice["logprobs"]
        assert found["token_logprobs"] == [None, *[-0.5] * (400 + NUM_OUTPUTS * NUM_EACH)]
        assert found["top_logprobs"] == [None, *[{"a": -0.5, "bytes:\\xc3": -1.5}] * (400 + NUM_OUTPUTS * NUM_EACH)]
        assert found["text_offset"] == list(range(401 + NUM_OUTPUTS * NUM_EACH))


LONG = msgspec.structs.replace(INFO, max_model_len=1_000_000)
MOST = MAX_REPLY_LOGPROBS // 21


@pytest.mark.parametrize(
    ("fields", "lengths", "most"),
    [
        ({}, [10], MOST),
        ({"n": 64}, [10], MOST // 64),
        ({"n": 2}, [10, 20], MOST // 4),
        ({"logprobs": 0}, [10], MAX_REPLY_LOGPROBS),
        ({"prompt_logprobs": 20}, [10, 20], (MOST - 30) // 2),
        ({"prompt_logprobs": 20, "n": 4}, [10], (MOST - 40) // 4),
    ],
)
def test_an_answer_is_as_long_as_a_reply_has_room_for(fields: dict[str, Any], lengths: list[int], most: int) -> None:
    fields = {"logprobs": 20, **fields}
    assert bound_logprobs(SamplingParams(**fields), lengths, LONG).max_tokens == most
    exact = SamplingParams(**fields, max_tokens=most)
    assert bound_logprobs(exact, lengths, LONG) is exact
    more = SamplingParams(**fields, max_tokens=most + 1)
    assert bound_logprobs(more, lengths, LONG, fits=True).max_tokens == most
    with pytest.raises(InvalidRequestError, match=f"set `max_tokens` to {most} or less"):
        bound_logprobs(more, lengths, LONG)
    with pytest.raises(InvalidRequestError, match="`max_tokens`"):
        bound_logprobs(SamplingParams(**fields, min_tokens=most + 1), lengths, LONG)
    short = msgspec.structs.replace(INFO, max_model_len=32)
    unset = SamplingParams(**fields)
    assert bound_logprobs(unset, [10], short) is unset


def test_answers_without_log_probabilities_are_as_long_as_they_like() -> None:
    sampling = SamplingParams(n=64, max_tokens=900_000)
    assert bound_logprobs(sampling, [10], LONG) is sampling


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", {"prompt": "a", "logprobs": 20}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 1, "logprobs": 20, "stream": True}),
    ],
)
def test_every_route_refuses_more(
    thinking: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr("cloister.server.sampling.MAX_REPLY_LOGPROBS", 2 * 21 * 10)
    with httpx.Client(base_url=thinking.url, timeout=20) as client:
        reply, fitting = (client.post(path, json={"n": 2, **fields, "max_tokens": most}) for most in (11, 10))
    assert "set `max_tokens` to 10 or less" in check_error(reply, 400)["message"]
    assert fitting.status_code == 200
