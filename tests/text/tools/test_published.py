"""Calls as the makers of models publish them, in words of our own: each family with what its models are seen to write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloister.text.answer_parser import REASONINGS, AnswerForm, AnswerParser
from cloister.text.parts import ParsedOutput
from cloister.text.tools import FAMILIES, Tool

PROPERTIES = {
    "city": {"type": "string"},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    "days": {"type": "integer"},
    "places": {"type": "array", "items": {"type": "object"}},
    "exact": {"type": "boolean"},
}
TOOLS = {name: Tool(name, {"type": "object", "properties": PROPERTIES}) for name in ("get_weather", "search")}
Found = tuple[str, str, list[tuple[str, dict[str, Any]]]]
OSLO = {"city": "Oslo"}
# (family, what the model wrote after a prompt that began its reasoning or not, whether it did) -> text, reasoning, calls
SAMPLES: list[tuple[str, str, bool, Found]] = [
    # DeepSeek-V3: text, then a fenced call; the end of the list is the end of the answer
    (
        "deepseek",
        "I will look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        False,
        ("I will look.", "", [("get_weather", OSLO)]),
    ),
    # DeepSeek-R1: its template begins the reasoning
    (
        "deepseek",
        "They want the weather.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        '{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n'
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        True,
        ("", "They want the weather.", [("search", {"city": "Oslo", "days": 3}), ("get_weather", OSLO)]),
    ),
    # DeepSeek-V3.1: no fence, and no word before the name
    (
        "deepseek_v31",
        '</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"exact": true}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        True,
        ("", "", [("get_weather", OSLO), ("search", {"exact": True})]),
    ),
    # Kimi K2, all on one line, and with line breaks
    (
        "kimi_k2",
        "I check both.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{"days": 2}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        False,
        ("I check both.", "", [("get_weather", OSLO), ("search", {"days": 2})]),
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.get_weather:12<|tool_call_argument_begin|>\n"
        '{"city": "Oslo"}\n<|tool_call_end|>\n<|tool_calls_section_end|>',
        False,
        ("", "", [("get_weather", OSLO)]),
    ),
    # Kimi K2 Thinking
    (
        "kimi_k2",
        "<think>The user asks.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.search:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        False,
        ("", "The user asks.", [("search", {})]),
    ),
    # GLM-4.5: types as the schema has them
    (
        "glm45",
        "\n<think>Which city? Oslo.</think>\nOne moment.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>places</arg_key>\n"
        '<arg_value>[{"a": 1}]</arg_value>\n</tool_call>',
        False,
        ("One moment.", "Which city? Oslo.", [("get_weather", {"city": "Oslo", "days": 3, "places": [{"a": 1}]})]),
    ),
    # GLM-4.6 and later, without line breaks; a text that looks like a number
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12</arg_value></tool_call><tool_call>search</tool_call>",
        False,
        ("", "", [("get_weather", {"city": "12"}), ("search", {})]),
    ),
    # MiniMax-M2: its template begins the reasoning
    (
        "minimax_m2",
        'They ask.\n</think>\n\n<minimax:tool_call>\n<invoke name="search">\n<parameter name="places">'
        '[{"b": "x"}]</parameter>\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        '<invoke name="get_weather">\n<parameter name="exact">true'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        True,
        ("", "They ask.", [("search", {"places": [{"b": "x"}], "city": "Oslo"}), ("get_weather", {"exact": True})]),
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Oslo</parameter></invoke></minimax:tool_call>',
        False,
        ("", "", [("get_weather", OSLO)]),
    ),
]


@pytest.mark.parametrize(("family", "text", "is_open", "expected"), SAMPLES)
@pytest.mark.parametrize("size", [10_000, 1, 7], ids=["whole", "letter by letter", "in sevens"])
def test_what_models_are_seen_to_write_is_read(family: str, text: str, is_open: bool, expected: Found, size: int) -> None:
    parser = AnswerParser(AnswerForm(REASONINGS.get("think"), is_open, FAMILIES.get(family), TOOLS))
    answer = ParsedOutput()
    for start in range(0, len(text), size):
        answer.add(parser.push(text[start : start + size]))
    answer.add(parser.flush())
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls.values()]
    assert (answer.text, answer.reasoning, calls) == expected


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.elsewhere:0<|tool_call_argument_begin|>{}"),
        ("kimi_k2", "<|tool_calls_section_begin|> nothing"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>[]"),
        ("glm45", "<tool_call>elsewhere\n</tool_call>"),
        ("glm45", "<tool_call>search\n<arg_key>a</arg_key>\n<arg_value>1"),
        ("glm45", "<tool_call>search\n<arg_key>a</arg_key> b <arg_value>1</arg_value></tool_call>"),
        (
            "glm45",
            "<tool_call>search<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
        ),
        ("minimax_m2", '<minimax:tool_call><invoke name="elsewhere"></invoke></minimax:tool_call>'),
        ("minimax_m2", '<minimax:tool_call><invoke name="search"><parameter name="a">1</invoke>'),
        ("minimax_m2", "<minimax:tool_call>search</minimax:tool_call>"),
    ],
)
def test_what_is_no_call_is_text(family: str, text: str) -> None:
    parser = AnswerParser(AnswerForm(None, False, FAMILIES.get(family), TOOLS))
    answer = ParsedOutput()
    answer.add(parser.push(text) + parser.flush())
    assert (answer.text, answer.calls) == (text, {})
