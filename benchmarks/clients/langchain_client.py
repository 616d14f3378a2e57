"""langchain-openai: invoke, stream, tools, structured output by both of its methods, embeddings, errors."""

from __future__ import annotations

import openai
from checks import QUESTION, run_checks, server_url
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

URL = server_url()
MODEL = openai.OpenAI(base_url=f"{URL}/v1", api_key="none").models.list().data[0].id
chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, max_tokens=200, temperature=0)
TEXT = QUESTION[0]["content"]


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(max_length=16)
    rating: int = Field(ge=1, le=10)


@tool
def get_weather(city: str) -> str:
    """Says what the weather is in a city."""
    return "rain"


def invoke() -> str:
    reply = chat.invoke(TEXT)
    assert reply.content
    return f"{reply.usage_metadata['output_tokens']} tokens"


def stream() -> str:
    pieces = [piece.content for piece in chat.stream(TEXT)]
    assert "".join(pieces) == chat.invoke(TEXT).content
    return f"{len(pieces)} pieces, the same text as at once"


def batch() -> str:
    return f"{len(chat.batch([TEXT] * 4))} answers at once"


def structured(method: str) -> str:
    reply = chat.with_structured_output(Joke, method=method).invoke(TEXT)
    assert isinstance(reply, Joke)
    return "a pydantic object"


def json_mode() -> str:
    """Nobody says how long the answer may be, and the model would go on to the end of its window."""
    unbounded = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, temperature=0)
    try:
        unbounded.with_structured_output(Joke, method="json_mode").invoke("Tell me a joke about cats.")
    except openai.LengthFinishReasonError as error:
        num_tokens = error.completion.usage.completion_tokens
        assert num_tokens == 2048
        return f"{num_tokens} tokens, and an error that says that it was cut"
    return "an answer that ended by itself"


def extra_fields() -> str:
    fields = {"typical_p": 0.9, "cache_salt": "x", "enable_thinking": False, "reasoning_effort": "low"}
    reply = chat.bind(extra_body=fields).invoke(TEXT)
    assert reply.content == chat.invoke(TEXT).content
    return "the same answer with fields that have no effect"


def tools() -> str:
    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    first = bound.invoke(TEXT)
    call = first.tool_calls[0]
    assert call["name"] == "get_weather" and "city" in call["args"]
    chat.bind_tools([get_weather]).invoke([HumanMessage(TEXT), first, ToolMessage("rain", tool_call_id=call["id"])])
    return "a call, and its result goes back"


def tools_streamed() -> str:
    whole = None
    for piece in chat.bind_tools([get_weather], tool_choice="any").stream(TEXT):
        whole = piece if whole is None else whole + piece
    assert whole is not None and "city" in whole.tool_calls[0]["args"]
    return "a call put together from its deltas"


def responses() -> str:
    other = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, max_tokens=16, use_responses_api=True)
    assert other.invoke(TEXT).text
    return "the Responses API"


def embeddings() -> str:
    maker = OpenAIEmbeddings(base_url=f"{URL}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False)
    vectors = maker.embed_documents(["one", "two"])
    return f"{len(vectors)} vectors of {len(vectors[0])}"


def errors() -> str:
    try:
        ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model="no-such-model", max_retries=0).invoke(TEXT)
    except openai.NotFoundError as error:
        return f"{error.status_code} {error.code}"
    raise AssertionError("an unknown model was taken")


run_checks(
    "langchain-openai",
    {
        "invoke": invoke,
        "stream": stream,
        "batch": batch,
        "structured output, json_schema": lambda: structured("json_schema"),
        "structured output, function_calling": lambda: structured("function_calling"),
        "json_mode without max_tokens": json_mode,
        "fields of other servers": extra_fields,
        "tools": tools,
        "tools, streamed": tools_streamed,
        "responses": responses,
        "embeddings": embeddings,
        "errors": errors,
    },
)
