"""Tools and reasoning in chat completions, through the openai SDK, on scripted engines and a real one with a grammar."""

from __future__ import annotations

import json
from dataclasses import fields as fields_of

import httpx
import msgspec
import openai
import pytest

from cloister.server.conversation import ChatFormat
from cloister.server.schemas import ChatBody
from cloister.text import ChatTemplate, Tokenizer
from cloister.text.answer_parser import REASONINGS
from cloister.text.spelling import SpecialTokens
from cloister.text.tools import FAMILIES
from cloister.types.config import ServerConfig
from cloister.types.errors import InvalidRequestError
from cloister.types.request import FinishReason, Grammar, GrammarKind, TokenLogprobs
from tests.server.running_server import (
    INFO,
    MODEL,
    ScriptedEngine,
    output,
    says,
    serving,
    serving_script,
    start_speaking,
    write_model,
)

HELLO = [{"role": "user", "content": "hello"}]
ROOMY = msgspec.structs.replace(INFO, max_model_len=4096)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
THINKING = ServerConfig(port=0, drain_timeout_s=1.0, reasoning_parser="think")


class Asked:
    """What came of one request, and what the engine was asked."""

    def __init__(self, model_path, script, *, config=None, **fields):
        engine = ScriptedEngine(says(script) if isinstance(script, str) else script, model=ROOMY)
        with (
            serving_script(model_path, engine, config=config) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
        ):
            asked = {"model": MODEL, "messages": HELLO, **fields}
            self.whole = sdk.chat.completions.create(**asked)
            self.chunks = list(sdk.chat.completions.create(**asked, stream=True))
        self.prompt = bytes(engine.taken[0].token_ids).decode()
        self.sampling = engine.taken[0].sampling

    @property
    def choice(self):
        return self.whole.choices[0]

    @property
    def calls(self):
        return [(call.function.name, call.function.arguments) for call in self.choice.message.tool_calls or []]

    @property
    def streamed_calls(self):
        """The calls as a client gathers them of deltas."""
        calls = {}
        for chunk in self.chunks:
            for delta in chunk.choices[0].delta.tool_calls or []:
                if delta.id is not None:
                    assert delta.index not in calls, "a call begins once"
                    assert (delta.type, delta.function.arguments) == ("function", "")
                    calls[delta.index] = [delta.function.name, ""]
                calls[delta.index][1] += delta.function.arguments
        return [tuple(call) for _, call in sorted(calls.items())]

    @property
    def streamed_text(self):
        return "".join(chunk.choices[0].delta.content or "" for chunk in self.chunks)


def test_every_chunk_of_a_call_but_the_last_has_a_list_of_logprobs(model_path):
    def script(request):
        entries = [TokenLogprobs(97, -0.5, ((97, -0.5),), b"a", (b"a",))]
        return [output(request, CALL, logprobs=entries), output(request, end=FinishReason.STOP, logprobs=[])]

    asked = Asked(model_path, script, tools=[WEATHER], logprobs=True)
    first, *others = [chunk.choices[0] for chunk in asked.chunks]
    assert (first.delta.role, first.logprobs.content) == ("assistant", [])
    assert [len(choice.logprobs.content) for choice in others if choice.finish_reason is None] == [1, 0]


def test_calls_come_whole_and_in_deltas(model_path):
    asked = Asked(model_path, TWO, tools=[WEATHER, NOW])
    assert asked.calls == asked.streamed_calls == [("weather", '{"city": "Köln"}'), ("now", "{}")]
    assert asked.choice.message.content == asked.streamed_text == "I look."
    assert asked.choice.finish_reason == asked.chunks[-1].choices[0].finish_reason == "tool_calls"
    assert len({call.id for call in asked.choice.message.tool_calls}) == 2
    pieces = [delta for chunk in asked.chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert len(pieces) > 10, "arguments come while they are written"


def test_content_is_null_beside_calls_alone(model_path):
    asked = Asked(model_path, CALL, tools=[WEATHER])
    assert asked.choice.message.content is None
    assert asked.choice.message.refusal is None


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
def test_no_argument_is_lost_however_many_tokens_a_step_brings(model_path, size):
    def script(request):
        pieces = [TWO[i : i + size] for i in range(0, len(TWO), size)]
        return [*(output(request, piece) for piece in pieces[:-1]), output(request, pieces[-1], end=FinishReason.STOP)]

    asked = Asked(model_path, script, tools=[WEATHER, NOW])
    assert asked.calls == asked.streamed_calls == [("weather", '{"city": "Köln"}'), ("now", "{}")]


def test_every_choice_has_calls_of_its_own(model_path):
    asked = Asked(model_path, CALL, tools=[WEATHER], n=2)
    assert [len(choice.message.tool_calls) for choice in asked.whole.choices] == [1, 1]
    by_choice = [sum(len(c.choices[0].delta.tool_calls or []) for c in asked.chunks if c.choices[0].index == i) for i in (0, 1)]
    assert by_choice[0] == by_choice[1] > 3


def test_a_malformed_call_is_content_and_the_answer_stops(model_path):
    broken = CALL.replace('"Köln"', "]")
    asked = Asked(model_path, broken, tools=[WEATHER])
    assert (asked.choice.message.content, asked.choice.message.tool_calls) == (broken, None)
    assert asked.choice.finish_reason == asked.chunks[-1].choices[0].finish_reason == "stop"
    assert asked.streamed_text == broken


def test_a_call_that_was_not_offered_is_content(model_path):
    asked = Asked(model_path, CALL, tools=[NOW])
    assert (asked.calls, asked.streamed_calls, asked.streamed_text) == ([], [], CALL)


def test_an_answer_that_was_cut_says_so(model_path):
    def script(request):
        return [output(request, CALL + CALL[:30], end=FinishReason.LENGTH)]

    asked = Asked(model_path, script, tools=[WEATHER])
    assert (len(asked.calls), asked.choice.message.content, asked.choice.finish_reason) == (1, CALL[:30], "length")


def test_without_tools_nothing_is_read_as_a_call(model_path):
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        asked = Asked(model_path, CALL, **fields)
        assert (asked.choice.message.content, asked.streamed_text, asked.choice.finish_reason) == (CALL, CALL, "stop")
        assert "weather" not in asked.prompt


def test_one_call_is_all_where_parallel_ones_are_not_wanted(model_path):
    asked = Asked(model_path, TWO, tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert asked.calls == asked.streamed_calls == [("weather", '{"city": "Köln"}')]


def test_a_conversation_with_calls_goes_round(model_path):
    first = Asked(model_path, CALL, tools=[WEATHER])
    message = first.choice.message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    second = Asked(model_path, "It rains.", tools=[WEATHER], messages=[*HELLO, message, result])
    assert second.prompt.endswith(f"assistant: {CALL}\nuser: <tool_response>rain</tool_response>\nassistant:")
    assert second.choice.message.content == "It rains."


def test_a_forced_call_has_a_grammar_and_a_free_one_has_none(model_path):
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    assert Asked(model_path, CALL, tools=[WEATHER]).sampling.grammar is None
    for choice, names in (("required", {"weather", "now"}), (named, {"weather"}), (allowed, {"weather"})):
        grammar = Asked(model_path, CALL, tools=[WEATHER, NOW], tool_choice=choice).sampling.grammar
        assert grammar.kind is GrammarKind.LARK
        assert {name for name in ("weather", "now") if f'\\"{name}\\"' in grammar.source} == names


def test_tools_that_are_not_allowed_stay_in_the_prompt_and_are_no_calls(model_path):
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    asked = Asked(model_path, TWO, tools=[WEATHER, NOW], tool_choice=allowed)
    assert "Weather of a city" in asked.prompt
    assert [name for name, _ in asked.calls] == ["now"]


def test_reasoning_comes_apart_from_the_answer_under_both_names(model_path):
    asked = Asked(model_path, THOUGHT + "Four.", config=THINKING)
    message = asked.choice.message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Four.", "hm", "hm")
    deltas = [chunk.choices[0].delta for chunk in asked.chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "hm"
    assert asked.streamed_text == "Four."
    details = asked.whole.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < asked.whole.usage.completion_tokens


def test_calls_come_after_reasoning(model_path):
    asked = Asked(model_path, THOUGHT + CALL, tools=[WEATHER], config=THINKING)
    assert asked.choice.message.reasoning_content == "hm"
    assert asked.calls == asked.streamed_calls == [("weather", '{"city": "Köln"}')]


def test_an_answer_without_reasoning_has_no_such_field(client):
    message = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2}).json()["choices"][0]["message"]
    assert set(message) == {"role", "content", "refusal"}


def test_reasoning_that_comes_back_is_accepted(model_path):
    answer = {"role": "assistant", "content": "Four.", "reasoning_content": "hm"}
    assert Asked(model_path, "ok", messages=[*HELLO, answer, *HELLO]).choice.message.content == "ok"


SWITCH = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{{ messages[0].content }}"
EFFORT = "{{ reasoning_effort | default('?') }}{{ messages[0].content }}"
PLAIN = "{{ messages[0].content }}"
ALWAYS = "{{ messages[0].content }}<think>\n{# </think> #}"


def manner_of(model_path, source):
    template = ChatTemplate({"default": source}, SpecialTokens({}, frozenset(), {}, True))
    return ChatFormat.of(Tokenizer(model_path), template, ServerConfig())


def open_with(model_path, source, **fields):
    """Returns the prompt of a request, or the name of the field that it is refused for."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
    try:
        opening = manner_of(model_path, source).open(body)
    except InvalidRequestError as error:
        return error.param
    return bytes(opening.token_ids).decode()


@pytest.mark.parametrize(
    ("source", "fields", "expected"),
    [
        (SWITCH, {}, "<think>x"),
        (SWITCH, {"reasoning_effort": "none"}, "x"),
        (SWITCH, {"reasoning_effort": "high"}, "<think>x"),
        (SWITCH, {"chat_template_kwargs": {"enable_thinking": False}}, "x"),
        (SWITCH, {"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
        (EFFORT, {"reasoning_effort": "low"}, "lowx"),
        (PLAIN, {"reasoning_effort": "none"}, "x"),
        (PLAIN, {"reasoning_effort": "low"}, "reasoning_effort"),
        (PLAIN, {"chat_template_kwargs": {"enable_thinking": False}}, "x"),
        (PLAIN, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        (ALWAYS, {"reasoning_effort": "high"}, "x<think>\n"),
        (ALWAYS, {"reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
def test_a_wish_about_reasoning_reaches_the_template_or_is_refused(model_path, source, fields, expected):
    assert open_with(model_path, source, **fields) == expected


BAD = [
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [{"type": "zanzibar"}]}, "tools[0].type"),
    ({"tools": [WEATHER], "tool_choice": "zanzibar"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "zanzibar"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER] * 129}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template": "{{ zanzibar }}"}, "chat_template"),
    ({"reasoning_effort": "zanzibar"}, "reasoning_effort"),
    ({"continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_tools_are_refused(client, fields, param):
    reply = client.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert reply.status_code == 400, reply.text
    assert "zanzibar" not in reply.text
    if param is not None:
        assert reply.json()["error"]["param"] == param


def test_a_schema_that_cannot_be_enforced_is_refused_only_where_it_would_be(model_path, client):
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {"required": ["a"]}}}}
    engine = ScriptedEngine(says("ok"), model=ROOMY)
    with serving_script(model_path, engine) as server:
        url = f"{server.url}/v1/chat/completions"
        assert httpx.post(url, json={"messages": HELLO, "tools": [odd]}).status_code == 200
        forced = httpx.post(url, json={"messages": HELLO, "tools": [odd], "tool_choice": "required"})
    assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tools[0].function.parameters")


def test_the_settings_name_every_parser():
    choices = {field.name: set(field.metadata["choices"]) for field in fields_of(ServerConfig)}
    assert choices["tool_parser"] == set(FAMILIES.names())
    assert choices["reasoning_parser"] == {*REASONINGS.names(), "none"}


HARMONY = ServerConfig(port=0, drain_timeout_s=1.0, reasoning_parser="harmony", tool_parser="harmony")
CHANNELS = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
)


def test_channels_of_harmony_are_reasoning_text_and_calls(model_path):
    asked = Asked(model_path, CHANNELS, config=HARMONY, tools=[WEATHER])
    assert asked.calls == asked.streamed_calls == [("weather", '{"city": "Köln"}')]
    assert asked.choice.message.content == asked.streamed_text == "I look."
    assert asked.choice.message.reasoning_content == "hm"
    assert asked.choice.finish_reason == "tool_calls"
    assert not asked.prompt.endswith("<|message|>")


def test_an_answer_with_a_form_is_written_into_the_final_channel(model_path):
    asked = Asked(model_path, '{"n": 7}', config=HARMONY, response_format={"type": "json_object"})
    assert asked.prompt.endswith("assistant:<|channel|>final<|message|>")
    assert asked.choice.message.content == '{"n": 7}'
    forced = Asked(model_path, CHANNELS[-99:], config=HARMONY, tools=[WEATHER], tool_choice="required")
    assert not forced.prompt.endswith("<|message|>")


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"n": {"const": 7}}}}}


def test_calls_and_an_answer_in_json_stand_side_by_side(model_path):
    asked = Asked(model_path, CALL, tools=[WEATHER], response_format=FORM)
    assert asked.calls == [("weather", '{"city": "Köln"}')]
    assert "start: calls | answer" in asked.sampling.grammar.source
    alone = Asked(model_path, '{"n": 7}', tools=[WEATHER], tool_choice="none", response_format=FORM)
    assert alone.sampling.grammar.kind is GrammarKind.JSON_SCHEMA
    assert alone.choice.message.content == '{"n": 7}'


def test_an_answer_in_a_form_is_no_reasoning(model_path):
    asked = Asked(model_path, '{"n": 7}', response_format=FORM, config=THINKING)
    assert asked.choice.message.content == '{"n": 7}'


def test_a_form_other_than_json_cannot_stand_beside_free_calls(client):
    body = {"messages": HELLO, "tools": [NOW], "guided_choice": ["a", "b"]}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "tool_choice"


def test_an_answer_in_a_form_is_no_reasoning_also_where_the_prompt_begins_one(model_path):
    chat_format, body = manner_of(model_path, ALWAYS), ChatBody.model_validate({"messages": HELLO, "tools": [WEATHER]})
    assert chat_format.open(body).form.is_open
    bound = chat_format.open(body, Grammar(GrammarKind.JSON_OBJECT))
    assert (bound.form.marks, bound.form.is_open) == (None, False)


@pytest.fixture(scope="module")
def marked_path(tmp_path_factory):
    """A model whose mark of calls is a control token, as Mistral's is."""
    path = write_model(tmp_path_factory.mktemp("marked"))
    mark = {"content": "[TOOL_CALLS]", "special": True, "normalized": False}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"257": mark}}))
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}{% if tools %}{% endif %}{# [TOOL_CALLS] #}")
    return path


def test_a_mark_that_is_a_control_token_is_seen_by_the_parser_and_by_nobody_else(marked_path):
    speech = [257, *b'[{"name": "now", "arguments": {}}]', 256]
    with (
        serving(marked_path, lambda: start_speaking(marked_path, speech)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        asked = {"model": MODEL, "messages": HELLO}
        message = sdk.chat.completions.create(**asked, tools=[NOW]).choices[0].message
        plain = sdk.chat.completions.create(**asked).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["now"]
    assert plain.content == '[{"name": "now", "arguments": {}}]'


def test_a_forced_call_names_a_control_token_by_its_number(marked_path):
    chat_format = ChatFormat.of(Tokenizer(marked_path), ChatTemplate.load(marked_path), ServerConfig())
    body = ChatBody.model_validate({"messages": HELLO, "tools": [NOW], "tool_choice": "required"})
    opening = chat_format.open(body)
    assert opening.shown_token_ids == (257,)
    assert "start: <[257]>" in opening.grammar.source
