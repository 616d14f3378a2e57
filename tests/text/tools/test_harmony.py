"""Answers of gpt-oss: channels of reasoning, text and calls, however the text is cut into pieces.

The samples have the form of those in OpenAI's description of harmony, in words of our own.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.text.answer_parser import REASONINGS, AnswerForm, AnswerParser
from cloister.text.parts import Arguments, CallBegun, CallEnded, ParsedOutput, Part, Reasoning, Text
from cloister.text.tools import FAMILIES, Tool
from tests.thinning import examples

TOOLS = {name: Tool(name, {"type": "object"}) for name in ("weather", "now")}
CITY = '{"city": "Oslo"}'
ANALYSIS = "<|channel|>analysis<|message|>They ask for a sum.<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CITY}"
WEATHER = [("weather", CITY)]
# text -> what it holds: text, reasoning, calls
SAMPLES: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "<|channel|>final<|message|>Four.<|return|>": ("Four.", "", []),
    f"{ANALYSIS}<|channel|>final<|message|>2 + 2 = **4**\n\nDone.": ("2 + 2 = **4**\n\nDone.", "They ask for a sum.", []),
    f"{ANALYSIS}{CALL}<|call|>": ("", "They ask for a sum.", WEATHER),
    f"{ANALYSIS}{CALL}": ("", "They ask for a sum.", WEATHER),
    f"{ANALYSIS}<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant{CALL}<|call|>": (
        "I look it up.", "They ask for a sum.", WEATHER,
    ),
    f"{CALL}<|call|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}<|call|>": (
        "", "", [*WEATHER, ("now", "{}")],
    ),
    f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{CITY}<|call|>": ("", "", WEATHER),
    f"{ANALYSIS} to=functions.weather<|channel|>commentary json<|message|>{CITY}<|call|>": (
        "", "They ask for a sum.", WEATHER,
    ),
    f"<|channel|>analysis to=functions.weather code<|message|>{CITY}<|call|>": ("", "", WEATHER),
    "<|channel|>analysis to=browser.search code<|message|>{}<|call|>": ("", "{}", []),
    "<|channel|>analysis<|message|>cut sh": ("", "cut sh", []),
    "No channels at all.": ("No channels at all.", "", []),
    "to=day is fine": ("to=day is fine", "", []),
    "": ("", "", []),
    "<|channel|>": ("<|channel|>", "", []),
    "<|channel|>final": ("<|channel|>final", "", []),
    f"<|channel|>commentary to=functions.elsewhere json<|message|>{CITY}<|call|>": (
        f"<|channel|>commentary to=functions.elsewhere json<|message|>{CITY}", "", [],
    ),
    CALL[:-2]: (CALL[:-2], "", []),
}  # fmt: skip


def parse(*pieces: str, is_open: bool = False, with_tools: bool = True) -> list[Part]:
    tools = TOOLS if with_tools else {}
    family = FAMILIES.get("harmony") if with_tools else None
    parser = AnswerParser(AnswerForm(REASONINGS.get("harmony"), is_open, family, tools))
    return [part for piece in pieces for part in parser.push(piece)] + parser.flush()


def gathered(parts: list[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    answer = ParsedOutput()
    answer.add(parts)
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.calls.values()]


@pytest.mark.parametrize("text", SAMPLES)
def test_channels_are_told_apart(text: str) -> None:
    assert gathered(parse(text)) == SAMPLES[text]
    assert gathered(parse(*text)) == SAMPLES[text]


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_no_cut_anywhere_changes_what_is_found(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([*SAMPLES])) + data.draw(st.sampled_from(["", " x", "<|end|>", "<|start|>assistant"]))
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    is_open, with_tools = data.draw(st.booleans()), data.draw(st.booleans())
    settings_of = {"is_open": is_open, "with_tools": with_tools}
    assert gathered(parse(*pieces, **settings_of)) == gathered(parse(text, **settings_of))


WORDS = ["<|channel|>", "<|message|>", "analysis", "final", "<|end|>", "<|start|>", "assistant", " x", "{}", "<|call|>", '{"a']
WORDS += ["commentary to=functions.now ", "<|constrain|>json"]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_nothing_that_a_model_may_write_breaks_the_reader_or_comes_twice(words: list[str]) -> None:
    text, reasoning, calls = gathered(parse("".join(words)))
    found = "".join([text, reasoning, *(arguments for _, arguments in calls)])
    assert all(found.count(word) <= sum(word in written for written in words) for word in ("x", "{"))
    if not {"<|channel|>", "<|start|>"} & {*words}:
        assert found.count("x") == words.count(" x")


def test_a_prompt_may_have_begun_the_analysis() -> None:
    assert gathered(parse("Hm.<|end|><|start|>assistant<|channel|>final<|message|>4", is_open=True)) == ("4", "Hm.", [])


def test_a_call_that_nobody_offered_is_text() -> None:
    assert gathered(parse(CALL, with_tools=False)) == (CALL, "", [])


def test_parts_come_while_they_are_written_and_are_counted() -> None:
    parser = AnswerParser(AnswerForm(REASONINGS.get("harmony"), False, FAMILIES.get("harmony"), TOOLS))
    assert parser.push("<|channel|>analysis<|mess") == []
    assert parser.push("age|>Hm") == [Reasoning("Hm")]
    assert parser.is_reasoning
    assert parser.push(".<|end|><|start|>assistant<|channel|>final<|message|>Fo") == [Reasoning("."), Text("Fo")]
    assert not parser.is_reasoning
    assert parser.push("ur<|end|>" + CALL[:-3]) == [Text("ur"), CallBegun(0, "weather"), Arguments(0, CITY[:-3])]
    assert parser.push(CITY[-3:]) == [Arguments(0, CITY[-3:]), CallEnded(0)]


def test_the_reader_sees_every_mark() -> None:
    marks = REASONINGS.get("harmony").all
    assert set(marks) == {"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"}
