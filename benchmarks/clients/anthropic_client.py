"""The official Python SDK of Anthropic against /v1/messages: text, streams, tools, counting, errors."""

from __future__ import annotations

import anthropic
from checks import QUESTION, WEATHER, model_name, run_checks, server_url

URL = server_url()
MODEL = model_name(URL)
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER["function"]["parameters"]}


def create() -> str:
    reply = client.messages.create(model=MODEL, messages=QUESTION, max_tokens=16, system="Be brief.")
    assert reply.content[0].text
    return f"{reply.usage.output_tokens} tokens, {reply.stop_reason}"


def stream() -> str:
    with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=16) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    return f"{len(text)} characters, {final.stop_reason}"


def tools() -> str:
    reply = client.messages.create(model=MODEL, messages=QUESTION, max_tokens=120, tools=[TOOL], tool_choice={"type": "any"})
    call = next(block for block in reply.content if block.type == "tool_use")
    assert set(call.input) == {"city", "unit"}
    return f"calls {call.name}, stop_reason {reply.stop_reason}"


def tools_streamed() -> str:
    with client.messages.stream(
        model=MODEL, messages=QUESTION, max_tokens=120, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}
    ) as stream:
        final = stream.get_final_message()
    call = next(block for block in final.content if block.type == "tool_use")
    assert set(call.input) == {"city", "unit"}
    return "arguments put together from their deltas"


def count() -> str:
    return f"{client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens} tokens"


def errors() -> str:
    try:
        client.messages.create(model="no-such-model", messages=QUESTION, max_tokens=4)
    except anthropic.NotFoundError as error:
        return f"{error.status_code} {error.body['error']['type']}"
    raise AssertionError("an unknown model was taken")


run_checks(
    "anthropic Python",
    {"create": create, "stream": stream, "tools": tools, "tools, streamed": tools_streamed, "count": count, "errors": errors},
)
