"""Calls are found in what a model writes, in every family's form, and however the text is cut into pieces."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.text.answer_parser import REASONINGS, AnswerForm, AnswerParser, detect_reasoning
from cloister.text.parts import Arguments, CallBegun, CallBroken, CallEnded, ParsedOutput, Reasoning, Text
from cloister.text.tools import FAMILIES, Tool, detect_family
from tests.thinning import examples

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = {tool.name: tool for tool in (Tool("weather", CITY, "Weather of a city"), Tool("now", {"type": "object"}))}
COLOGNE = {"city": 'Köln "am }{] Rhein\\" 🙂'}
WRITTEN = json.dumps(COLOGNE, ensure_ascii=False)
DEEP = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
TWO_CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>\n<tool_call>{{"name":"now"}}',
    "llama3": f'{{"name": "weather", "parameters": {WRITTEN}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {WRITTEN}}}, {{"arguments": {{}}, "name": "now", "id": "a"}}]',
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{WRITTEN}[TOOL_CALLS]now[CALL_ID]VvvODy9mT[ARGS]{{}}",
    "phi4": f'<|tool_call|>[{{"name": "weather", "arguments": {WRITTEN}}}, {{"name": "now", "arguments": {{}}}}]<|/tool_call|>',
    "granite": f'<tool_call>[{{"name": "weather", "arguments": {WRITTEN}}},{{"name": "now"}}]',
    "deepseek": DEEP.format(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{WRITTEN}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    ),
    "deepseek_v31": DEEP.format(
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WRITTEN}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    ),
    "qwen3_coder": (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{COLOGNE['city']}\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>"
        f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{WRITTEN}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "glm45": (
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{COLOGNE['city']}</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>"
    ),
    "minimax_m2": (
        f'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{COLOGNE["city"]}</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    "harmony": (
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{WRITTEN}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    ),
}
BROKEN = [
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"name": "weather", "arguments": {"city": "Kö',
    '<tool_call>{"name": "weather", "arguments": {"city": "a"',
    '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call> and more',
    '<tool_call>{"name": "weather", "arguments": {"city": "a",}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": ["a"]}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "elsewhere", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"nane": "weather"}</tool_call>',
    "<tool_call>weather(city)</tool_call>",
    '<tool_call>{"name": "weather", "arguments": {"city": ' + "[" * 5000,
    '<tool_call>{"name": "weather", "arguments": {"city": ' + "[" * 2000 + "]" * 2000 + "}}</tool_call>",
    '<tool_call>{"name": "\\ud8"}</tool_call>',
]


def parse(family, *pieces, **more):
    """Returns the parts of an answer that came in pieces."""
    form = AnswerForm(family=FAMILIES.get(family) if family else None, tools=TOOLS, **more)
    parser = AnswerParser(form)
    return [part for piece in pieces for part in parser.push(piece)] + parser.flush()


def gathered(parts):
    answer = ParsedOutput()
    answer.add(parts)
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.calls.values()]


def pieces_of(text, places):
    bounds = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize(("family", "text"), TWO_CALLS.items(), ids=TWO_CALLS)
def test_two_calls_and_the_text_before_them_are_found(family, text):
    content = "" if family == "llama3" else "I look it up."
    found, _, calls = gathered(parse(family, content + "\n\n" + text if content else text))
    assert found == content
    assert [name for name, _ in calls] == ["weather", "now"]
    assert [json.loads(arguments) for _, arguments in calls] == [COLOGNE, {}]


@pytest.mark.parametrize(("family", "text"), TWO_CALLS.items(), ids=TWO_CALLS)
def test_no_cut_in_one_or_two_places_changes_what_is_found(family, text):
    whole = gathered(parse(family, text))
    for first in range(len(text)):
        assert gathered(parse(family, *pieces_of(text, [first]))) == whole
    for places in itertools.combinations(range(0, len(text), 3), 2):
        assert gathered(parse(family, *pieces_of(text, places))) == whole


TEXTS = [
    *TWO_CALLS.items(),
    *(("hermes", text[:200]) for text in BROKEN),
    ("llama3", '{"answer": 5} <|python_tag|>{"name": "now"}'),
]


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_no_cut_anywhere_changes_what_is_found(data):
    family, text = data.draw(st.sampled_from(TEXTS))
    text = (
        data.draw(st.sampled_from(["", "Wait. ", "<think>\nhm</think>\n", "  "]))
        + text
        + data.draw(st.sampled_from(["", "\n", " x"]))
    )
    text = text[: data.draw(st.integers(0, len(text)))]
    marks = data.draw(st.sampled_from([None, REASONINGS.get("think")]))
    pieces = pieces_of(text, data.draw(st.sets(st.integers(0, len(text)))))
    assert gathered(parse(family, *pieces, marks=marks)) == gathered(parse(family, text, marks=marks))
    assert gathered(parse(family, *text, marks=marks)) == gathered(parse(family, text, marks=marks))


WORDS = ["<tool_call>", '{"name": "now"', "}", '"', "[", "]", "x", "\\", " ", "[TOOL_CALLS]", "now[ARGS]{}", "<|tool_call|>"]
WORDS += ["<|channel|>", "<|message|>", "commentary to=functions.now", "<|call|>", "<arg_key>", "now", "</arg_value>"]
WORDS += ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", '<minimax:tool_call><invoke name="now">', "</invoke>"]
WORDS += ["</tool_call>", '{"name": "now", "parameters": {}}', "<function=now>", "<｜tool▁calls▁begin｜>"]


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(list(TWO_CALLS)), st.lists(st.sampled_from(WORDS)))
def test_whatever_a_model_writes_gives_an_answer_and_no_letter_of_text_is_lost(family, words):
    text = "".join(words)
    parts = parse(family, *words)
    begun = [part.index for part in parts if isinstance(part, CallBegun)]
    ended = [part.index for part in parts if isinstance(part, CallEnded | CallBroken)]
    assert begun == ended == list(range(len(begun)))
    if not begun:
        assert gathered(parts)[0] == text


@pytest.mark.parametrize("text", BROKEN)
def test_a_malformed_call_comes_back_as_content(text):
    assert gathered(parse("hermes", "So: " + text)) == ("So: " + text, "", [])
    assert gathered(parse("hermes", *("So: " + text))) == ("So: " + text, "", [])


def test_a_call_after_a_broken_one_is_found():
    text = '<tool_call>{"name": "x"}</tool_call><tool_call>{"name": "now"}</tool_call>'
    assert gathered(parse("hermes", text)) == ('<tool_call>{"name": "x"}</tool_call>', "", [("now", "{}")])


def test_arguments_come_while_they_are_written():
    parser = AnswerParser(AnswerForm(family=FAMILIES.get("hermes"), tools=TOOLS))
    assert parser.push('<tool_call>{"name": "wea') == []
    assert parser.push('ther", "arguments": {"ci') == [CallBegun(0, "weather"), Arguments(0, '{"ci')]
    assert parser.push('ty": "Bonn"}') == [Arguments(0, 'ty": "Bonn"}')]
    assert parser.push("}") == [CallEnded(0)]
    assert parser.push("</tool_call>") == []
    assert parser.flush() == []


def test_text_without_calls_comes_as_it_is_written():
    parser = AnswerParser(AnswerForm(family=FAMILIES.get("hermes"), tools=TOOLS))
    assert parser.push("Good") == [Text("Good")]
    assert parser.push(" day <to") == [Text(" day")]
    assert parser.push("ast>") == [Text(" <toast>")]
    assert parser.push(" \n") == []
    assert parser.flush() == [Text(" \n")]


def test_long_space_is_not_held_back_and_a_mark_after_it_is_found():
    text = "a" + " " * 200 + '<tool_call>{"name": "now"}</tool_call>'
    for pieces in ([text], text):
        assert gathered(parse("hermes", *pieces)) == ("a" + " " * 136, "", [("now", "{}")])


def test_a_name_that_was_not_offered_is_no_call_and_json_is_an_answer_like_any_other():
    for text in (
        '{"name": "elsewhere", "parameters": {}}',
        '{"answer": {"name": "now"}}',
        "{",
        "{}",
        '{"name": "Anna", "age": 3}',
    ):
        assert gathered(parse("llama3", text)) == (text, "", [])


def test_a_single_call_may_stand_without_its_list():
    text = '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>'
    assert gathered(parse("phi4", text)) == ("", "", [("now", "{}")])
    assert gathered(parse("phi4", "functools" + TWO_CALLS["phi4"][13:-14]))[2][1] == ("now", "{}")


def test_an_example_of_a_call_has_the_marks_of_its_family():
    optional = {"[CALL_ID]", "<tool_call>", "functools", "<|python_tag|>", "<|start|>", "<|end|>", "<|return|>"}
    for name in FAMILIES.names():
        family = FAMILIES.get(name)
        assert all(mark in family.example for mark in {*family.marks, *family.inner_marks} - optional)


def test_only_the_first_call_counts_where_one_is_all():
    for family, text in TWO_CALLS.items():
        _, _, calls = gathered(parse(family, text, parallel=False))
        assert [name for name, _ in calls] == ["weather"]
    text = '<tool_call>{"name": "now", "arguments": {]}</tool_call>' + TWO_CALLS["hermes"]
    assert [name for name, _ in gathered(parse("hermes", text, parallel=False))[2]] == ["weather"]


def test_values_between_tags_have_the_types_of_the_schema():
    text = (
        "<tool_call><function=weather><parameter=city>12</parameter>\n<parameter=days>\n3\n</parameter></function></tool_call>"
    )
    assert gathered(parse("qwen3_coder", text))[2] == [("weather", '{"city": "12", "days": 3}')]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nhm, 2+2\n</think>\n\nFour.", False, ("Four.", "hm, 2+2")),
        ("hm, 2+2\n</think>\n\nFour.", True, ("Four.", "hm, 2+2")),
        ("<think>hm</think>Four.", True, ("Four.", "hm")),
        ("<think>cut sh", False, ("", "cut sh")),
        ("cut sh", True, ("", "cut sh")),
        ("\n\nFour </think>.", False, ("\n\nFour </think>.", "")),
        ("<think>\n\n</think>\n\nFour.", False, ("Four.", "")),
    ],
)
def test_reasoning_is_parted_from_the_answer(text, is_open, expected):
    marks = REASONINGS.get("think")
    for pieces in ([text], text):
        assert gathered(parse(None, *pieces, marks=marks, is_open=is_open))[:2] == expected


def test_reasoning_comes_as_it_is_thought_and_calls_inside_it_are_none():
    parser = AnswerParser(AnswerForm(REASONINGS.get("think"), True, FAMILIES.get("hermes"), TOOLS))
    assert parser.push("Perhaps <tool_call>") == [Reasoning("Perhaps <tool_call>")]
    assert parser.push("?</thi") == [Reasoning("?")]
    assert parser.push('nk>\n<tool_call>{"name": "now"}') == [CallBegun(0, "now"), Arguments(0, "{}"), CallEnded(0)]


def test_reasoning_is_found_by_either_mark_in_the_template():
    assert detect_reasoning("{{ '<think>\n' }}") == detect_reasoning("{{ m.content.split('</think>')[-1] }}") == "think"
    assert detect_reasoning("[THINK]") == "magistral"
    assert detect_reasoning("<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>") == "harmony"
    assert detect_reasoning("<|user|>{{ m.content }}<|end|>") is None
    assert detect_reasoning("{{ messages }}") is None


def test_every_family_is_found_by_what_its_template_writes():
    assert detect_family("{{ '<tool_call>' }}") == "hermes"
    assert detect_family("<tool_call>{function-name}<arg_key>") == "glm45"
    assert detect_family("<|tool_calls_section_begin|><|tool_call_begin|>") == "kimi_k2"
    assert detect_family("{% set begin = '<minimax:tool_call>' %}<invoke name=") == "minimax_m2"
    assert detect_family("<|start|>assistant<|channel|>final<|message|>") == "harmony"
    assert detect_family("[TOOL_CALLS] {{ name }}[ARGS]") == "mistral_args"
    assert detect_family("{{ messages }}") is None
