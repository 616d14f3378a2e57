"""litellm, which speaks to any server of the OpenAI API: completion, stream, tools, structured output, embedding, errors."""

from __future__ import annotations

import json

import litellm
from checks import QUESTION, WEATHER, model_name, run_checks, server_url

URL = server_url()
MODEL = model_name(URL)
OPTIONS = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def completion() -> str:
    reply = litellm.completion(**OPTIONS, messages=QUESTION, max_tokens=16)
    return f"{reply.usage.completion_tokens} tokens"


def stream() -> str:
    chunks = litellm.completion(**OPTIONS, messages=QUESTION, stream=True, max_tokens=16)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces)
    return f"{len(pieces)} chunks"


def tools() -> str:
    reply = litellm.completion(**OPTIONS, messages=QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=120)
    return f"calls {reply.choices[0].message.tool_calls[0].function.name}"


def structured() -> str:
    form = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA, "strict": True}}
    reply = litellm.completion(**OPTIONS, messages=QUESTION, response_format=form, max_tokens=60)
    assert isinstance(json.loads(reply.choices[0].message.content)["n"], int)
    return "valid"


def embedding() -> str:
    return f"{len(litellm.embedding(**OPTIONS, input=['one']).data[0]['embedding'])} dimensions"


def anthropic_messages() -> str:
    reply = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=URL, api_key="none", num_retries=0, messages=QUESTION, max_tokens=16
    )
    assert reply.choices[0].message.content
    return "by way of /v1/messages"


def errors() -> str:
    try:
        litellm.completion(**{**OPTIONS, "model": "openai/no-such-model"}, messages=QUESTION)
    except litellm.NotFoundError as error:
        return f"{error.status_code}"
    raise AssertionError("an unknown model was taken")


run_checks(
    "litellm",
    {
        "completion": completion,
        "stream": stream,
        "tools": tools,
        "structured output": structured,
        "embedding": embedding,
        "anthropic": anthropic_messages,
        "errors": errors,
    },
)
