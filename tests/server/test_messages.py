"""The Messages API through the anthropic SDK, on real engines and scripted ones."""

from __future__ import annotations

import msgspec
import pytest

from cloister.types.config import ServerConfig
from cloister.types.errors import EngineError
from cloister.types.request import FinishReason
from tests.server.running_server import INFO, MODEL, ScriptedEngine, output, says, serving_script

SPEECH = "Größe: 5 €. " * 40
HELLO = [{"role": "user", "content": "hello"}]
ROOMY = msgspec.structs.replace(INFO, max_model_len=4096)
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
THINKING = ServerConfig(port=0, drain_timeout_s=1.0, reasoning_parser="think")


def client_of(server, **options):
    import anthropic  # takes a second, which every process that collects would pay

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def sdk(speaking):
    with client_of(speaking) as sdk:
        yield sdk


def asking(model_path, script, ask, **options):
    """Asks a server that plays a script; returns what came and the prompt that the engine got."""
    engine = ScriptedEngine(says(script) if isinstance(script, str) else script, model=ROOMY)
    with serving_script(model_path, engine, **options) as server, client_of(server) as sdk:
        came = ask(sdk)
    return came, bytes(engine.taken[0].token_ids).decode() if engine.taken else None


def create(sdk, **fields):
    return sdk.messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 100, **fields})


def gather(sdk, **fields):
    """Streams; returns the message that the SDK gathered, and the events."""
    with sdk.messages.stream(**{"model": MODEL, "messages": HELLO, "max_tokens": 100, **fields}) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def test_the_sdk_gets_text(sdk):
    message = create(sdk, max_tokens=20)
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "max_tokens")
    assert SPEECH.startswith(message.content[0].text)
    assert message.usage.output_tokens == 20
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(b"user: hello\nassistant:")


def test_the_sdk_streams_the_same_message(sdk):
    whole = create(sdk, max_tokens=30)
    streamed, _ = gather(sdk, max_tokens=30)
    assert streamed.content[0].text == whole.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", 30)


def test_events_come_in_order_and_under_their_names(client):
    body = {"max_tokens": 3, "messages": HELLO, "stream": True}
    lines = client.post("/v1/messages", json=body).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert "[DONE]" not in lines[-1] + lines[-2]


def test_a_stop_sequence_is_named(sdk):
    message = create(sdk, stop_sequences=["€", "zzz"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("Größe: 5 ", "stop_sequence", "€")


def test_system_and_blocks_of_every_kind_reach_the_template(model_path):
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}], "is_error": False},
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "be brief"}]
    message, prompt = asking(model_path, "ok", lambda sdk: create(sdk, messages=messages, system=system))
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    assert prompt == (
        f"system: be brief\nuser: Weather?\nassistant: Wait.\n{call}\n"
        "user: <tool_response>rain</tool_response>\nAnd now?\nassistant:"
    )
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("thinking", ["hm", ""])
def test_a_turn_that_only_thought_goes_back(model_path, thinking):
    """An answer that `max_tokens` cut while it thought: clients send whole turns back, some without the thoughts."""
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": thinking, "signature": ""}]}
    message, prompt = asking(model_path, "ok", lambda sdk: create(sdk, messages=[*HELLO, thought, *HELLO]))
    assert prompt == "user: hello\nassistant: \nuser: hello\nassistant:"
    assert message.content[0].text == "ok"


def test_a_last_message_of_the_assistant_is_gone_on_with(model_path):
    begun = [*HELLO, {"role": "assistant", "content": "It is "}]
    message, prompt = asking(model_path, "so.", lambda sdk: create(sdk, messages=begun))
    assert prompt == "user: hello\nassistant: It is "
    assert message.content[0].text == "so."


def test_a_call_is_a_block_of_its_own(model_path):
    whole, prompt = asking(model_path, "Let me see.\n" + CALL, lambda sdk: create(sdk, tools=[WEATHER]))
    (streamed, events), _ = asking(model_path, "Let me see.\n" + CALL, lambda sdk: gather(sdk, tools=[WEATHER]))
    for message in (whole, streamed):
        text, call = message.content
        assert text.text == "Let me see."
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Köln"})
        assert message.stop_reason == "tool_use"
    assert [event.partial_json for event in events if event.type == "input_json"] == ['{"city": "Köln"}']
    assert "Weather of a city" in prompt


def test_a_call_that_breaks_is_text_in_a_stream_too(model_path):
    broken = CALL.replace('"Köln"', "]")
    (message, _), _ = asking(model_path, broken, lambda sdk: gather(sdk, tools=[WEATHER]))
    assert [block.type for block in message.content] == ["text"]
    assert (message.content[0].text, message.stop_reason) == (broken, "end_turn")


def test_one_call_is_all_where_parallel_ones_are_disabled(model_path):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message, _ = asking(model_path, CALL + CALL, lambda sdk: create(sdk, tools=[WEATHER], tool_choice=choice))
    assert [block.type for block in message.content] == ["tool_use"]


def test_thinking_is_a_block_before_the_text(model_path):
    thought = "<think>\nhm\n</think>\n\nFour."
    whole, _ = asking(model_path, thought, create, config=THINKING)
    (streamed, _), _ = asking(model_path, thought, gather, config=THINKING)
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == ("hm", "Four.")


def test_tokens_are_counted_without_an_answer(sdk):
    assert sdk.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens == len(b"user: hello\nassistant:")
    longer = sdk.messages.count_tokens(model=MODEL, messages=HELLO, system="be brief", tools=[WEATHER])
    assert longer.input_tokens > 200


def test_a_failure_in_the_middle_is_the_last_event(model_path):
    from anthropic import APIStatusError

    def script(request):
        return [output(request, "Half"), EngineError("The engine is gone; send it again.")]

    with pytest.raises(APIStatusError, match="The engine is gone"):
        asking(model_path, script, gather)


def test_a_rejected_request_keeps_its_status(model_path):
    from anthropic import InternalServerError

    def script(request):
        return [output(request, end=FinishReason.ERROR, error="The engine failed; send it again.")]

    with pytest.raises(InternalServerError) as caught:
        asking(model_path, script, create)
    assert caught.value.body["error"]["type"] == "overloaded_error"


BAD = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"temperature": 1.5}, "temperature"),
    ({"system": 5}, "system"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": "zanzibar"}}]}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "role"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "result"),
    ({"tools": [{"type": "web_search_20250305", "name": "zanzibar"}]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "`tools[0].input_schema`"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "Shorten"),
    ({"container": "zanzibar"}, "container"),
]


@pytest.mark.parametrize(("fields", "says"), BAD)
def test_a_bad_request_is_refused_in_this_apis_form(client, fields, says):
    reply = client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 5, **fields})
    assert reply.status_code == 400, reply.text
    assert set(reply.json()) == {"type", "error"}
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert says in reply.json()["error"]["message"]
    assert "zanzibar" not in reply.text


@pytest.mark.parametrize(
    ("kind", "content", "status"),
    [("application/json", b"{", 400), ("text/plain", b"{}", 415), ("application/json", b" " * 5_000_000, 413)],
)
def test_errors_of_every_layer_have_this_apis_form(client, kind, content, status):
    reply = client.post("/v1/messages", content=content, headers={"content-type": kind})
    assert reply.status_code == status
    assert reply.json()["type"] == "error"
    assert int(reply.headers["content-length"]) == len(reply.content)


def test_an_answer_ends_with_the_window_however_long_it_may_be(sdk):
    message = create(sdk, max_tokens=20_000)
    assert message.usage.output_tokens == 256 - len(b"user: hello\nassistant:")
    assert message.stop_reason == "max_tokens"


def test_an_unknown_model_is_not_found(client):
    reply = client.post("/v1/messages", json={"model": "other", "messages": HELLO, "max_tokens": 5})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
