"""LlamaIndex by way of OpenAILike, its embeddings, and its Ollama class: complete, chat, streams, tools, structured output."""

from __future__ import annotations

import openai
from checks import QUESTION, model_name, run_checks, server_url
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

URL = server_url()
MODEL = model_name(URL)
OPTIONS = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0, "context_window": 8192}
TEXT = QUESTION[0]["content"]
model = OpenAILike(model=MODEL, is_chat_model=True, is_function_calling_model=True, max_tokens=120, temperature=0, **OPTIONS)
ollama = Ollama(model=MODEL, base_url=URL, temperature=0, context_window=2048, additional_kwargs={"num_predict": 24})


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(max_length=16)
    rating: int = Field(ge=1, le=10)


def get_weather(city: str) -> str:
    """Says what the weather is in a city."""
    return f"rain in {city}"


def chat(llm: LLM) -> str:
    reply = llm.chat([ChatMessage(role="user", content=TEXT)])
    assert reply.message.content
    return f"{len(reply.message.content)} characters"


def stream(llm: LLM) -> str:
    messages = [ChatMessage(role="user", content=TEXT)]
    pieces = [piece.delta or "" for piece in llm.stream_chat(messages)]
    assert "".join(pieces) == llm.chat(messages).message.content
    return f"{len(pieces)} pieces, the same text as at once"


def complete() -> str:
    plain = OpenAILike(model=MODEL, is_chat_model=False, max_tokens=8, **OPTIONS)
    assert plain.complete("VACUUM is").text
    return "by way of /v1/completions"


def tools() -> str:
    tool = FunctionTool.from_defaults(get_weather)
    reply = model.chat_with_tools([tool], user_msg=TEXT, tool_required=True)
    calls = model.get_tool_calls_from_response(reply, error_on_no_tool_call=True)
    assert calls[0].tool_name == "get_weather" and "city" in calls[0].tool_kwargs
    return f"{len(calls)} call"


def structured() -> str:
    forced = OpenAILike(
        model=MODEL,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_tokens=120,
        **OPTIONS,
    )
    found = forced.as_structured_llm(Joke).complete(TEXT).raw
    assert isinstance(found, Joke)
    return "a pydantic object"


def embeddings() -> str:
    maker = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="none")
    vectors = maker.get_text_embedding_batch(["one", "two"])
    return f"{len(vectors)} vectors of {len(vectors[0])}"


def errors() -> str:
    try:
        OpenAILike(model="no-such-model", is_chat_model=True, **OPTIONS).chat([ChatMessage(role="user", content=TEXT)])
    except openai.NotFoundError as error:
        return f"{error.status_code} {error.code}"
    raise AssertionError("an unknown model was taken")


run_checks(
    "LlamaIndex",
    {
        "chat": lambda: chat(model),
        "stream": lambda: stream(model),
        "completions": complete,
        "tools": tools,
        "structured output": structured,
        "embeddings": embeddings,
        "errors": errors,
        "Ollama: chat": lambda: chat(ollama),
        "Ollama: stream": lambda: stream(ollama),
    },
)
