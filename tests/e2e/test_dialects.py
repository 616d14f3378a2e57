"""Tools, responses and messages against `cloister serve` with the embedded model, through the official SDKs."""

import json

import jsonschema
import openai
import pytest

from tests.serving import MODEL, ServeProcess

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "minItems": 2, "maxItems": 2},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
PING = {"type": "function", "function": {"name": "ping"}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def server():
    running = ServeProcess("--num-threads", "1")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server):
    import anthropic  # takes a second, which every process that collects would pay

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


def gathered(chunks):
    """Returns the calls of a stream."""
    calls = {}
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or []:
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = (name + (delta.function.name or ""), arguments + delta.function.arguments)
    return [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_follows_its_schema_whole_and_streamed(client, choice, temperature):
    tools = [TOOL] if choice == "required" else [PING, TOOL]
    asked = {"model": MODEL, "messages": ASK, "tools": tools, "tool_choice": choice, "max_tokens": 300}
    asked |= {"temperature": temperature, "seed": 5, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert (call.function.name, whole.finish_reason, whole.message.content) == ("weather", "tool_calls", None)
    assert gathered(client.chat.completions.create(**asked, stream=True)) == [("weather", call.function.arguments)]


def test_the_embedded_model_calls_by_itself_and_reads_the_result(client):
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {**FUNCTION, "parameters": city}}
    asked = {"model": MODEL, "tools": [tool], "max_tokens": 200, "temperature": 0}
    first = client.chat.completions.create(messages=ASK, **asked).choices[0]
    assert first.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "12 degrees, rain"}
    second = client.chat.completions.create(messages=[*ASK, first.message, result], **asked).choices[0]
    assert second.finish_reason in ("stop", "tool_calls")


def test_an_answer_in_json_or_a_call_and_nothing_else(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for seed in range(4):
        choice = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[TOOL], response_format=form, max_tokens=300, temperature=1.5, seed=seed
        ).choices[0]
        if choice.message.tool_calls:
            assert choice.message.content is None
            for call in choice.message.tool_calls:
                jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
        else:
            jsonschema.validate(json.loads(choice.message.content), schema)


def test_responses_force_calls_and_schemas(client):
    tools = [{"type": "function", **FUNCTION, "strict": True}]
    asked = {"model": MODEL, "input": "Weather in Paris?", "max_output_tokens": 300, "parallel_tool_calls": False}
    response = client.responses.create(**asked, tools=tools, tool_choice="required")
    (call,) = response.output
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    form = {"format": {"type": "json_schema", "name": "weather", "schema": PARAMETERS, "strict": True}}
    with client.responses.stream(**asked, text=form) as stream:
        jsonschema.validate(json.loads(stream.get_final_response().output_text), PARAMETERS)


def test_messages_force_calls_and_count_tokens(claude):
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {"model": MODEL, "messages": ASK, "tools": tools}
    message = claude.messages.create(**asked, max_tokens=300, tool_choice=choice)
    (call,) = message.content
    jsonschema.validate(call.input, PARAMETERS)
    assert message.stop_reason == "tool_use"
    usage = message.usage
    counted = claude.messages.count_tokens(**asked)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with claude.messages.stream(**asked, max_tokens=300, tool_choice=choice) as stream:
        assert stream.get_final_message().content[0].name == "weather"


def test_leaving_a_stream_of_any_dialect_cancels_it(server, client, claude):
    for stream in (
        client.responses.create(model=MODEL, input="x", max_output_tokens=7000, stream=True),
        claude.messages.create(model=MODEL, messages=ASK, max_tokens=7000, stream=True),
    ):
        next(iter(stream))
        stream.close()
    server.wait_until(lambda: server.metric("num_requests_running") == 0)
