"""Messages reach a template in the form that it wants: with calls, results and tools."""

import json
import time

import pytest

from cloister.text import ChatTemplate
from cloister.text.history import EXAMPLE, Habits
from cloister.text.spelling import SpecialTokens
from cloister.types.errors import InvalidRequestError

SPECIAL = SpecialTokens({}, frozenset(), {}, are_literal=True)
TOOL = {"type": "function", "function": {"name": "w", "description": "Weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_0123456789", "type": "function", "function": {"name": "w", "arguments": '{"city": "Köln"}'}}
CHAT = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "rain"},
]


def render(source, messages=CHAT, tools=None):
    return ChatTemplate({"default": source}, SPECIAL).render(messages, tools)


EACH_CALL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ CALL }}{% endfor %}{% endfor %}{% if tools %}{% endif %}"
)


def test_arguments_are_an_object_where_the_template_reads_one():
    source = EACH_CALL.replace("CALL", "c.function.arguments.city")
    assert render(source) == "Köln"
    assert render(EACH_CALL.replace("CALL", "c.function.arguments | tojson")) == '{"city": "Köln"}'


def test_arguments_are_json_where_the_template_adds_them_to_text():
    assert render(EACH_CALL.replace("CALL", "'=' + c.function.arguments")) == '={"city": "Köln"}'


@pytest.mark.parametrize("arguments", ["not json", "[1]", '"text"', "[" * 5000])
def test_arguments_that_are_no_object_are_passed_as_they_are(arguments):
    call = {**CALL, "function": {"name": "w", "arguments": arguments}}
    chat = [CHAT[0], {**CHAT[1], "tool_calls": [call]}]
    assert render(EACH_CALL.replace("CALL", "c.function.arguments"), chat) == arguments


def test_empty_arguments_are_an_empty_object():
    call = {**CALL, "function": {"name": "w", "arguments": ""}}
    chat = [CHAT[0], {**CHAT[1], "tool_calls": [call]}]
    assert render(EACH_CALL.replace("CALL", "c.function.arguments | tojson"), chat) == "{}"


def test_content_beside_calls_is_null_only_for_a_template_that_asks():
    asks = (
        "{% for m in messages %}{% if m['content'] is none %}call{% else %}{{ m.content }}{% endif %},"
        "{% if m.tool_calls %}{% endif %}{% endfor %}{{ tools }}"
    )
    assert render(asks) == "Weather?,call,rain,None"
    assert render(asks.replace("m['content'] is none", "not m.content")) == "Weather?,call,rain,None"
    assert render("{% for m in messages if m.tool_calls is defined %}({{ m.content }}){% endfor %}{{ tools }}") == "()None"


def test_ids_are_short_and_agree_for_a_template_that_wants_nine_letters():
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}"
        "{% endif %}{{ c.id }} {% endfor %}{{ m.tool_call_id }}{% endfor %}{% if tools %}{% endif %}"
    )
    first, second = render(source).replace("None", "").split()
    assert first == second
    assert len(first) == 9
    nine = [CHAT[0], {**CHAT[1], "tool_calls": [{**CALL, "id": "abcdefgh1"}]}]
    assert "abcdefgh1" in render(source, nine)


def test_a_template_without_a_place_for_tools_gets_them_as_text():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text = render(source, tools=[TOOL])
    assert text.startswith("<system># Tools")
    assert json.dumps(TOOL["function"]) in text
    assert '<assistant><tool_call>{"name": "w", "arguments": {"city": "Köln"}}</tool_call><user><tool_response>rain' in text
    told = render(source, [{"role": "system", "content": "Be brief."}, CHAT[0]], tools=[TOOL])
    assert told.startswith("<system>Be brief.\n\n# Tools")
    assert told.count("<system>") == 1
    assert render(source, CHAT[:1]) == "<user>Weather?"


def test_a_template_that_writes_calls_and_no_tools_writes_its_calls_by_itself():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | length if m.tool_calls }}{% endfor %}"
    template = ChatTemplate({"default": source}, SPECIAL)
    text = template.render(CHAT, [TOOL], call_example="call w like this")
    assert text.endswith("<user>Weather?<assistant>1<tool>rain")
    assert "call w like this" in text


def test_results_have_the_name_of_what_was_called():
    source = "{% for m in messages %}{{ m.name if m.role == 'tool' }}{% if m.tool_calls %}{% endif %}{% endfor %}"
    assert render(source) == "w"


def test_a_template_that_takes_descriptions_for_granted_gets_empty_ones():
    bare = {"type": "function", "function": {"name": "w"}}
    about = "{{ t.function.name + ':' + t.function.description }}"
    source = "{% for t in tools %}" + about + "{% for p in t.function.parameters.properties | items %}{% endfor %}{% endfor %}"
    assert render(source, CHAT[:1], [bare]) == "w:"


def test_a_template_that_takes_tools_for_a_list_gets_none_at_all_where_there_are_none():
    source = "{% if tools is defined %}{% for t in tools %}{% endfor %}tools{% endif %}{{ messages[0].content }}"
    assert render(source, CHAT[:1]) == "Weather?"
    assert render(source, CHAT[:1], [TOOL]) == "toolsWeather?"


def test_a_template_that_refuses_system_messages_gets_tools_in_the_first_of_the_user():
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system messages') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    chat = [*CHAT, {"role": "tool", "tool_call_id": "2", "content": "12 degrees"}, {"role": "user", "content": "And now?"}]
    text = render(source, chat, [TOOL])
    assert text.startswith("<user># Tools")
    assert text.endswith(
        "</tool_call><user><tool_response>rain</tool_response>\n<tool_response>12 degrees</tool_response>\nAnd now?"
    )
    with pytest.raises(InvalidRequestError, match="No system messages"):
        render(source, [{"role": "system", "content": "Be brief."}, CHAT[0]])


def test_the_last_message_is_gone_on_with():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}{{ 'more' if add_generation_prompt }}"
    chat = [CHAT[0], {"role": "assistant", "content": "It is <b> and "}]
    template = ChatTemplate({"default": source}, SPECIAL)
    assert template.render(chat, continue_final_message=True) == "<user>Weather?</s><assistant>It is <b> and "
    with pytest.raises(InvalidRequestError, match="cannot end inside"):
        ChatTemplate({"default": "{{ messages[0].content }}"}, SPECIAL).render(chat, continue_final_message=True)


def test_a_template_that_looks_for_tools_in_the_system_message_finds_them_there():
    source = "{% for message in messages %}{{ message.role }}:{{ message.tools }} {% endfor %}"
    assert render(source, CHAT[:1], [TOOL]) == f"system:{json.dumps([TOOL], ensure_ascii=False)} user: "


def test_what_a_template_says_of_calls_is_told():
    source = EACH_CALL.replace("CALL", "raise_exception('No calls here')")
    with pytest.raises(InvalidRequestError, match="No calls here"):
        render(source)


def test_many_results_are_joined_in_little_time():
    results = [{"role": "tool", "tool_call_id": "c", "content": "rain" * 60}] * 16_000
    began_s = time.process_time()
    (fitted,) = Habits.of("{{ messages }}").fit(results, None, EXAMPLE)
    assert time.process_time() - began_s < 2
    assert fitted["content"].count("rain" * 60) == 16_000


PARTS = (
    "{% for message in messages %}{{ message['role'] }}:{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% else %}[{{ line['type'] }}]{% endif %}{% endfor %};{% endfor %}"
)
SEEING = [{"type": "image"}, {"type": "text", "text": "what?"}]


def test_text_is_a_part_for_a_template_that_reads_parts_only():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SEEING}]
    assert render(PARTS, chat) == "system:Be brief.;user:[image]what?;"
    both = PARTS.replace(
        "{% for line", "{% if message['content'] is string %}{{ message['content'] | upper }}{% else %}{% for line", 1
    )
    both = both.replace("{% endfor %};", "{% endfor %}{% endif %};", 1)
    assert render(both, chat) == "system:BE BRIEF.;user:[image]what?;"


def test_images_stay_where_tools_and_results_are_written_around_them():
    chat = [*CHAT, {"role": "user", "content": SEEING}]
    text = render(PARTS, chat, [TOOL])
    assert text.startswith("system:# Tools")
    assert text.endswith("user:<tool_response>rain</tool_response>\n[image]what?;")
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + PARTS
    told = render(refuses, [{"role": "user", "content": SEEING}], [TOOL])
    assert told.startswith("user:# Tools")
    assert told.endswith("\n\n[image]what?;")
