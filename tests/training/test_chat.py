"""The chat template, rendered by this recipe, by transformers and by a bare sandbox; and what is learned from a chat."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.thinning import examples
from training.chat import TEMPLATE, Chat, Encoded, TemplateError, encode_chat, render
from training.tokenizer import CALL_TOKENS, CONTROL_TOKENS, train_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & 'here', in °C",
        "parameters": {"type": "object", "properties": {"unit": {"type": "string"}, "city": {"type": "string"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich <1>"}}}
CALL_AS_TEXT = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "What is re?\n"}],
    "system and turns": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "é <b> & '"},
    ],
    "tool call and result": [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL_AS_TEXT]},
        {"role": "tool", "content": '{"sky": "clear"}', "tool_call_id": "call_1"},
    ],
    "content in parts": [
        {"role": "developer", "content": [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]},
        {"role": "user", "content": [{"type": "text", "text": "Three?"}]},
    ],
    "a later system message": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the lamp and the river and the stone and {} of 0123456789 words"] * 4, 300)


@pytest.mark.parametrize("tools", [[], [WEATHER], [WEATHER, WEATHER["function"]]], ids=["no tools", "one", "two"])
@pytest.mark.parametrize("prompt", [False, True], ids=["whole", "prompt"])
@pytest.mark.parametrize("name", list(CONVERSATIONS))
def test_every_renderer_gives_the_same_text(tokenizer: Tokenizer, name: str, prompt: bool, tools: list[Any]) -> None:
    messages = CONVERSATIONS[name]
    ours = render(messages, tools, prompt=prompt)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=prompt, tokenize=False
    )
    assert ours == theirs
    for trim in (False, True):
        bare = ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim)
        bare.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        template = bare.from_string(TEMPLATE)
        assert ours == template.render(messages=messages, tools=tools or None, add_generation_prompt=prompt)


def test_a_question_renders_as_the_card_says() -> None:
    assert render(CONVERSATIONS["one question"], prompt=True) == "<|user|>What is re?\n<|end|><|assistant|>"


def test_calls_render_with_arguments_as_json_whether_given_as_text_or_not() -> None:
    text = render(CONVERSATIONS["tool call and result"])
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich <1>"}}</tool_call>' in text
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>' in text


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(TemplateError, match="role"):
        render([{"role": "oracle", "content": "x"}])


def learned_text(tokenizer: Tokenizer, encoded: Encoded) -> str:
    ids = [token for token, learned in zip(encoded.ids, encoded.learned, strict=True) if learned]
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_only_the_assistants_words_are_learned(tokenizer: Tokenizer) -> None:
    encoded = encode_chat(tokenizer, Chat.of("the lamp", "the river", "and", "stone", system="words"))
    assert learned_text(tokenizer, encoded) == "the river<|end|>stone<|end|>"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == (
        "<|system|>words<|end|><|user|>the lamp<|end|><|assistant|>the river<|end|><|user|>and<|end|><|assistant|>stone<|end|>"
    )


def test_a_call_is_learned_and_its_result_is_not(tokenizer: Tokenizer) -> None:
    chat = Chat((*CONVERSATIONS["tool call and result"], {"role": "assistant", "content": "clear"}), (WEATHER,))
    text = learned_text(tokenizer, encode_chat(tokenizer, chat))
    assert text.startswith("<tool_call>")
    assert text.endswith("</tool_call><|end|>clear<|end|>")
    assert "sky" not in text


def test_special_tokens_are_in_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS + CALL_TOKENS] == list(range(8))
    assert tokenizer.get_vocab_size() <= 300


def test_calls_survive_where_control_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|assistant|><tool_call>{}</tool_call><|end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>{}</tool_call>"


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "cloister-5m" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


EMBEDDED = Path(__file__).parents[2] / "src" / "cloister" / "models" / "embedded"
