"""The Responses API through the openai SDK, on real engines and scripted ones."""

from __future__ import annotations

import json

import msgspec
import openai
import pytest

from cloister.types.config import ServerConfig
from cloister.types.errors import EngineError
from cloister.types.request import FinishReason, TokenLogprobs
from tests.server.running_server import INFO, MODEL, ScriptedEngine, output, says, serving_script

ROOMY = msgspec.structs.replace(INFO, max_model_len=4096)
SPEECH = "Größe: 5 €. " * 40
PART = {"type": "input_text", "text": "And "}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = 'Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
THINKING = ServerConfig(port=0, drain_timeout_s=1.0, reasoning_parser="think")


@pytest.fixture(scope="module")
def sdk(speaking):
    with openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def asking(model_path, script, ask, **options):
    """Asks a server that plays a script; returns what came and the prompt that the engine got."""
    engine = ScriptedEngine(says(script) if isinstance(script, str) else script, model=ROOMY)
    with (
        serving_script(model_path, engine, **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        came = ask(sdk)
    return came, bytes(engine.taken[0].token_ids).decode() if engine.taken else None


def test_the_sdk_gets_text(sdk):
    response = sdk.responses.create(model=MODEL, input="hello", max_output_tokens=20)
    assert SPEECH.startswith(response.output_text)
    assert len(response.output_text) > 10
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.output_tokens, response.usage.total_tokens) == (20, 20 + response.usage.input_tokens)
    assert response.store is False


def test_the_sdk_streams_the_same_text_in_numbered_events(sdk):
    ask = {"model": MODEL, "input": "hello", "max_output_tokens": 30}
    whole = sdk.responses.create(**ask)
    events = list(sdk.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-4].text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage


def test_the_sdks_own_stream_gathers_the_answer(model_path):
    def ask(sdk):
        with sdk.responses.stream(model=MODEL, input="hello") as stream:
            return stream.get_final_response()

    response, _ = asking(model_path, "All good.", ask)
    assert (response.status, response.output_text) == ("completed", "All good.")


def test_instructions_and_items_of_every_kind_reach_the_template(model_path):
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "message", "role": "user", "content": [PART, PART | {"text": "now?"}]},
    ]  # fmt: skip
    _, prompt = asking(model_path, "ok", lambda sdk: sdk.responses.create(model=MODEL, input=items, instructions="be brief"))
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    assert prompt == (
        f"system: be brief\nuser: Weather?\nassistant: Wait.\n{call}\n"
        "user: <tool_response>rain</tool_response>\nAnd now?\nassistant:"
    )


def test_an_answer_without_a_letter_is_a_message_all_the_same(model_path):
    response, _ = asking(model_path, "", lambda sdk: sdk.responses.create(model=MODEL, input="hello"))
    (message,) = response.output
    assert (message.type, message.status, message.content[0].text) == ("message", "completed", "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_an_item_of_its_own(model_path, stream):
    def ask(sdk):
        asked = {"model": MODEL, "input": "Weather?", "tools": [WEATHER]}
        if not stream:
            return sdk.responses.create(**asked)
        with sdk.responses.stream(**asked) as events:
            seen = list(events)
            pieces = [event.delta for event in seen if event.type == "response.function_call_arguments.delta"]
            assert len(pieces) > 5
            assert "".join(pieces) == '{"city": "Köln"}'
            return events.get_final_response()

    response, prompt = asking(model_path, CALL, ask)
    message, call = response.output
    assert message.content[0].text == "Let me see."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Köln"})
    assert call.call_id != call.id
    assert "Weather of a city" in prompt


def test_a_call_that_breaks_is_text(model_path):
    broken = '<tool_call>{"name": "weather", "arguments": {"city": ]}</tool_call>'
    asked = {"model": MODEL, "input": "Weather?", "tools": [WEATHER]}
    response, _ = asking(model_path, broken, lambda sdk: sdk.responses.create(**asked))
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == broken
    events, _ = asking(model_path, broken, lambda sdk: list(sdk.responses.create(**asked, stream=True)))
    assert [(item.type, item.status) for item in events[-1].response.output] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_an_item_before_the_message(model_path, stream):
    def ask(sdk):
        asked = {"model": MODEL, "input": "2+2?", "stream": stream}
        if not stream:
            return sdk.responses.create(**asked)
        events = list(sdk.responses.create(**asked))
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "hm"
        return events[-1].response

    response, _ = asking(model_path, THOUGHT + "Four.", ask, config=THINKING)
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert message.content[0].text == "Four."
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_logprobs_come_with_the_text(model_path):
    entries = [TokenLogprobs(97, -0.5, ((97, -0.5),), b"a", (b"a",))]

    def script(request):
        return [output(request, "a", logprobs=entries), output(request, end=FinishReason.STOP, logprobs=[])]

    ask = {"model": MODEL, "input": "x", "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    response, _ = asking(model_path, script, lambda sdk: sdk.responses.create(**ask))
    assert response.output[0].content[0].logprobs[0].token == "a"
    events, _ = asking(model_path, script, lambda sdk: list(sdk.responses.create(**ask, stream=True)))
    assert [event.logprobs[0].logprob for event in events if event.type == "response.output_text.delta"] == [-0.5]


def test_a_failure_in_the_middle_is_the_last_event(model_path):
    def script(request):
        return [output(request, "Half"), EngineError("The engine is gone; send it again.")]

    events, _ = asking(model_path, script, lambda sdk: list(sdk.responses.create(model=MODEL, input="x", stream=True)))
    assert (events[-1].type, events[-1].code) == ("error", "engine_error")
    assert events[-1].sequence_number == len(events) - 1


BAD = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "item_reference", "id": "zanzibar"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "zanzibar"}]}]}, None),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, None),
    ({"tools": [{"type": "web_search"}]}, None),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x" * 300}, "input"),
    ({"max_output_tokens": 300}, "max_output_tokens"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
    ({"model": "zanzibar"}, "model"),
    ({"text": {"verbosity": "zanzibar"}}, None),
    ({"include": ["zanzibar"]}, None),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_a_bad_request_is_refused(client, fields, param):
    reply = client.post("/v1/responses", json={"input": "x", **fields})
    assert reply.status_code in (400, 404), reply.text
    error = reply.json()["error"]
    assert "zanzibar" not in reply.text
    if param is not None:
        assert error["param"] == param


def test_what_asks_for_nothing_passes(client):
    fields = {
        "store": False,
        "truncation": "disabled",
        "background": False,
        "previous_response_id": None,
        "service_tier": "auto",
    }
    reply = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == MODEL
