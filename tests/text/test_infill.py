"""Prompts that fill in the middle, in the way of each family."""

from __future__ import annotations

import pytest
import tokenizers

from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from cloister.text import Tokenizer
from cloister.text.infill import FAMILIES, Infill


def with_tokens(path, *texts):
    write_byte_tokenizer(path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(list(texts))
    tokenizer.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_own_tokens_around_what_is_known(tmp_path, family):
    marks = FAMILIES[family]
    tokenizer = with_tokens(tmp_path, *[mark for mark in (marks.before, marks.between, marks.after) if mark], *marks.others)
    infill = Infill.of(tokenizer)
    assert infill is not None
    text = tokenizer.decode(infill.encode("def f(", "):"), skip_special_tokens=False)
    first, second = ("):", "def f(") if marks.is_suffix_first else ("def f(", "):")
    assert text == f"{marks.before}{first}{marks.between}{second}{marks.after}"
    assert len(infill.stop_token_ids) == len([mark for mark in (marks.before, marks.between, marks.after) if mark]) + len(
        marks.others
    )


def test_a_text_cannot_write_the_tokens(tmp_path):
    tokenizer = with_tokens(tmp_path, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    infill = Infill.of(tokenizer)
    ids = infill.encode("a<|fim_middle|>", "b")
    assert ids.count(tokenizer.token_id("<|fim_middle|>")) == 1


def test_a_model_without_them_does_not_fill_in(tmp_path):
    assert Infill.of(with_tokens(tmp_path, "<|fim_prefix|>")) is None
