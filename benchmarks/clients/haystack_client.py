"""Haystack: its chat generators for both of OpenAI's APIs, streams, tools, structured output, embedders, a pipeline, errors."""

from __future__ import annotations

import json

import openai
from checks import QUESTION, model_name, run_checks, server_url
from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel, Field

URL = server_url()
MODEL = model_name(URL)
OPTIONS = {"api_base_url": f"{URL}/v1", "api_key": Secret.from_token("none"), "max_retries": 0}
TEXT = QUESTION[0]["content"]
MESSAGES = [ChatMessage.from_user(TEXT)]


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(max_length=16)
    rating: int = Field(ge=1, le=10)


def get_weather(city: str) -> str:
    """Says what the weather is in a city."""
    return "rain"


def generator(model: str = MODEL, **fields: object) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(model=model, generation_kwargs={"temperature": 0, "max_tokens": 120, **fields}, **OPTIONS)


def chat() -> str:
    reply = generator().run(MESSAGES)["replies"][0]
    assert reply.text
    return f"{reply.meta['usage']['completion_tokens']} tokens"


def stream() -> str:
    pieces: list[str] = []
    generator().run(MESSAGES, streaming_callback=lambda chunk: pieces.append(chunk.content))
    assert "".join(pieces) == generator().run(MESSAGES)["replies"][0].text
    return f"{len(pieces)} pieces, the same text as at once"


def tools() -> str:
    reply = generator(tool_choice="required").run(MESSAGES, tools=[create_tool_from_function(get_weather)])["replies"][0]
    call = reply.tool_calls[0]
    assert call.tool_name == "get_weather" and "city" in call.arguments
    answer = generator().run([*MESSAGES, reply, ChatMessage.from_tool("rain", origin=call)])["replies"][0]
    return f"a call; after its result {len(answer.text or '')} characters"


def structured() -> str:
    Joke.model_validate(json.loads(generator(response_format=Joke).run(MESSAGES)["replies"][0].text))
    return "a valid object"


def responses() -> str:
    made = OpenAIResponsesChatGenerator(model=MODEL, generation_kwargs={"max_output_tokens": 16}, **OPTIONS)
    assert made.run(MESSAGES)["replies"][0].text
    return "the Responses API"


def embeddings() -> str:
    document = OpenAIDocumentEmbedder(model=MODEL, progress_bar=False, raise_on_failure=True, **OPTIONS).run(
        [Document(content="one")]
    )["documents"][0]
    question = OpenAITextEmbedder(model=MODEL, **OPTIONS).run("one")["embedding"]
    assert len(document.embedding) == len(question)
    return f"{len(question)} numbers"


def pipeline() -> str:
    line = Pipeline()
    line.add_component("prompt", ChatPromptBuilder(template=[ChatMessage.from_user("{{question}}")]))
    line.add_component("model", generator())
    line.connect("prompt.prompt", "model.messages")
    assert line.run({"prompt": {"question": TEXT}})["model"]["replies"][0].text
    return "prompt and model"


def errors() -> str:
    try:
        generator("no-such-model").run(MESSAGES)
    except openai.NotFoundError as error:
        return f"{error.status_code} {error.code}"
    raise AssertionError("an unknown model was taken")


run_checks(
    "Haystack",
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured output": structured,
        "responses": responses,
        "embeddings": embeddings,
        "pipeline": pipeline,
        "errors": errors,
    },
)
