"""Pydantic AI: runs and streams of an agent, its three kinds of output, a tool that it calls, both of OpenAI's APIs, errors."""

from __future__ import annotations

from checks import QUESTION, model_name, run_checks, server_url
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = server_url()
NAME = model_name(URL)
PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
SETTINGS = {"temperature": 0, "max_tokens": 120}
TEXT = QUESTION[0]["content"]
model = OpenAIChatModel(NAME, provider=PROVIDER)


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(max_length=16)
    rating: int = Field(ge=1, le=10)


async def run() -> str:
    reply = await Agent(model, model_settings=SETTINGS).run(TEXT)
    assert reply.output
    return f"{reply.usage.output_tokens} tokens"


async def stream() -> str:
    agent = Agent(model, model_settings=SETTINGS)
    async with agent.run_stream(TEXT) as reply:
        pieces = [piece async for piece in reply.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == (await agent.run(TEXT)).output
    return f"{len(pieces)} pieces, the same text as at once"


async def output(kind: object) -> str:
    reply = await Agent(model, output_type=kind, model_settings=SETTINGS, retries=0).run(TEXT)
    assert isinstance(reply.output, Joke)
    return "a pydantic object"


async def prompted() -> str:
    """Asks for JSON mode: the schema is in the prompt only, and a small model may write another object."""
    try:
        return await output(PromptedOutput(Joke))
    except UnexpectedModelBehavior:
        return "an object that is none of the model's, which the client says"


async def tool() -> str:
    agent = Agent(model, model_settings={**SETTINGS, "max_tokens": 60})
    cities: list[str] = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Says what the weather is in a city."""
        cities.append(city)
        return "rain"

    reply = await agent.run(TEXT)
    assert reply.output
    return f"an answer after {len(cities)} calls"


async def responses() -> str:
    reply = await Agent(OpenAIResponsesModel(NAME, provider=PROVIDER), output_type=NativeOutput(Joke), retries=0).run(TEXT)
    assert isinstance(reply.output, Joke)
    return "a pydantic object"


async def errors() -> str:
    try:
        await Agent(OpenAIChatModel("no-such-model", provider=PROVIDER)).run(TEXT)
    except ModelHTTPError as error:
        assert error.status_code == 404
        return "404"
    raise AssertionError("an unknown model was taken")


run_checks(
    "Pydantic AI",
    {
        "run": run,
        "stream": stream,
        "output by tool": lambda: output(ToolOutput(Joke)),
        "native output": lambda: output(NativeOutput(Joke)),
        "prompted output": prompted,
        "tools": tool,
        "responses": responses,
        "errors": errors,
    },
)
