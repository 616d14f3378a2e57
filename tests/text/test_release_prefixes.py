"""System prompts of a release: read strictly, and equal to how conversations with them begin."""

from __future__ import annotations

import json

import pytest

from cloister.models import locate
from cloister.text import ChatTemplate, Tokenizer
from cloister.text.chat import read_release_prefixes
from cloister.types.errors import ConfigError

PROMPT = "You answer questions about SQLite and say so when you do not know."


@pytest.fixture(scope="module")
def model():
    path = locate("cloister-5m")
    return Tokenizer(path), ChatTemplate.load(path)


def test_a_conversation_with_the_prompt_begins_with_its_tokens(model, tmp_path):
    tokenizer, template = model
    path = tmp_path / "prefixes.json"
    path.write_text(json.dumps([PROMPT]), encoding="utf-8")
    (prefix,) = read_release_prefixes(path, tokenizer, template)
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "What is a view?"}]
    whole = tokenizer.encode(template.render(messages))
    assert len(prefix) > 10
    assert whole[: len(prefix)] == prefix


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '[""]', "[1]", '"a"'])
def test_what_is_no_list_of_prompts_is_refused(model, tmp_path, text):
    path = tmp_path / "prefixes.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="list") as refusal:
        read_release_prefixes(path, *model)
    assert refusal.value.param == "release_prefixes"


def test_a_file_that_is_not_there_is_named(model, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_release_prefixes(tmp_path / "none.json", *model)
