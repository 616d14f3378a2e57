"""The official Python SDK of OpenAI: chat, streams, tools, structured output, logprobs, responses, embeddings, errors."""

from __future__ import annotations

import asyncio
import json

import openai
from checks import QUESTION, WEATHER, run_checks, server_url
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

URL = server_url()
client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
MODEL = client.models.list().data[0].id


class Step(BaseModel):
    explanation: str = Field(max_length=20)
    result: int = Field(ge=0, le=99)


class Answer(BaseModel):
    steps: list[Step] = Field(max_length=2)
    final: str = Field(max_length=10)


def chat() -> str:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    assert reply.choices[0].message.content
    assert reply.choices[0].message.refusal is None
    assert reply.usage and reply.usage.prompt_tokens_details is not None
    return f"{reply.usage.completion_tokens} tokens, cached {reply.usage.prompt_tokens_details.cached_tokens}"


def stream() -> str:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage
    return f"{len(chunks)} chunks, the same text as at once, usage in the last one"


def logprobs() -> str:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    found = reply.choices[0].logprobs
    assert found and found.content
    assert "".join(entry.token for entry in found.content) == reply.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in found.content)
    return f"{len(found.content)} positions with 3 alternatives; their tokens are the text"


def several() -> str:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, n=3, seed=7)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    return "n = 3, three choices"


def required_tool() -> str:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=120
    )
    call = reply.choices[0].message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and set(arguments) == {"city", "unit"}, arguments
    assert reply.choices[0].finish_reason in ("tool_calls", "stop")
    return f"a valid call, finish_reason {reply.choices[0].finish_reason}"


def named_tool_stream() -> str:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice=choice, max_tokens=120, stream=True
    )
    name, arguments, num_deltas = "", "", 0
    for chunk in stream:
        for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
            num_deltas += 1
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city", "unit"}
    return f"{num_deltas} deltas make valid arguments"


def tool_result() -> str:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=8)
    assert reply.choices[0].message.content is not None
    return "the result of a call goes back"


def parsed() -> str:
    reply = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Answer, max_tokens=200)
    answer = reply.choices[0].message.parsed
    assert isinstance(answer, Answer)
    return f"a pydantic object with {len(answer.steps)} steps"


def json_object() -> str:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_format={"type": "json_object"}, max_tokens=200, temperature=0, seed=1
    )
    choice = reply.choices[0]
    if choice.finish_reason == "length":
        return "cut by max_tokens, as it says"
    assert isinstance(json.loads(choice.message.content or ""), dict)
    return "a JSON object"


def stream_helper() -> str:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, max_tokens=200, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.content
    return f"events {', '.join(sorted(kinds))}"


def completion() -> str:
    reply = client.completions.create(model=MODEL, prompt="VACUUM", max_tokens=8, logprobs=2, echo=True)
    assert reply.choices[0].text.startswith("VACUUM")
    assert reply.choices[0].logprobs and reply.choices[0].logprobs.token_logprobs[0] is None
    return "echo with logprobs of the prompt"


def responses() -> str:
    reply = client.responses.create(model=MODEL, input="What does VACUUM do?", max_output_tokens=16, store=False)
    assert reply.output_text
    return f"status {reply.status}, {reply.usage.output_tokens} tokens"


def responses_stream() -> str:
    with client.responses.stream(model=MODEL, input="What does VACUUM do?", max_output_tokens=16) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text
    return f"{len(kinds)} events from {kinds[0]} to {kinds[-1]}"


def responses_parse() -> str:
    reply = client.responses.parse(model=MODEL, input="Count.", text_format=Answer, max_output_tokens=200)
    assert isinstance(reply.output_parsed, Answer)
    return "a pydantic object"


def embeddings() -> str:
    reply = client.embeddings.create(model=MODEL, input=["one", "two"])
    assert [item.index for item in reply.data] == [0, 1]
    plain = client.embeddings.create(model=MODEL, input="one", encoding_format="float")
    assert max(abs(a - b) for a, b in zip(plain.data[0].embedding, reply.data[0].embedding, strict=True)) < 1e-6
    return f"{len(reply.data[0].embedding)} dimensions, base64 and float alike"


def errors() -> str:
    seen = []
    cases = (
        (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"max_tokens": 10**6}),
    )
    for kind, change in cases:
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 4, **change})
        except kind as error:
            seen.append(f"{error.status_code} {error.code} {error.param}")
        else:
            raise AssertionError(f"{change} was taken")
    return "; ".join(seen)


async def cancel() -> str:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as other:
        stream = await other.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        for _ in range(50):
            text = (await other._client.get(f"{URL}/metrics")).text
            running = [line for line in text.splitlines() if line.startswith("cloister_num_requests_running")]
            if running and running[0].split()[-1] in ("0", "0.0"):
                return "nothing runs any more after the client left"
            await asyncio.sleep(0.1)
    raise AssertionError("the request still runs")


run_checks(
    "openai Python",
    {
        "chat": chat,
        "stream": stream,
        "logprobs": logprobs,
        "n": several,
        "tool, required": required_tool,
        "tool, named, streamed": named_tool_stream,
        "tool result": tool_result,
        "structured output": parsed,
        "json_object": json_object,
        "stream helper": stream_helper,
        "completions": completion,
        "responses": responses,
        "responses, streamed": responses_stream,
        "responses, structured": responses_parse,
        "embeddings": embeddings,
        "errors": errors,
        "cancel": cancel,
    },
)
