"""The least tokens of a text: never more than it has, and not far below where the text is one that people write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Library

from cloister.models import locate
from cloister.text import Tokenizer, token_bound
from cloister.text.tokenizer import LONG_TEXT_CHARS, MARK, Guard
from tests.text import models
from tests.thinning import examples

PIECES = [
    *models.CORPUS, "a", " ", "  ", " " * 70, "\n", "\t", "the server", "▁", "▁▁▁", "<0x41>", "<0x0A>", "<s>", "</s>",
    "<|im_end|>", "<|endoftext|>", "<think>", "<mask>", "e\u0301", "\u0301", "한", "\u1112\u1161\u11ab", "ﬁ①", "😀", MARK,
    "zqxj", "0123456789", "\x00",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=30).map("".join)


def change(path: Path, **flags: bool) -> Path:
    """Adds a token that takes spaces with it to a byte-level tokenizer."""
    models.byte_level(path)
    tokenizer = Library.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<mask>", **flags)])
    return models.save(path, tokenizer)


def normalizing(path: Path) -> Path:
    """As Qwen: byte-level, and text is composed first."""
    models.byte_level(path)
    tokenizer = Library.from_file(str(path / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    return models.save(path, tokenizer, bos_token="<|endoftext|>", add_bos_token=True)


def lacking(path: Path) -> Path:
    """As SmolLM2: byte-level, but letters for some bytes are missing, here that for "q"."""
    models.byte_level(path)
    content = json.loads((path / "tokenizer.json").read_text())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    content["model"]["vocab"] = {token.replace("q", "\ufffd"): token_id for token, token_id in vocab.items()}
    content["model"]["merges"] = [merge for merge in merges if "q" not in "".join(merge)]
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bounds")
    paths = {
        "byte-level": models.byte_level(folder / "byte"),
        "composing": normalizing(folder / "composing"),
        "lacking": lacking(folder / "lacking"),
        "stretching": change(folder / "stretching", lstrip=True, rstrip=True),
        "sentencepiece": models.sentence_piece(folder / "legacy"),
        "metaspace": models.sentence_piece(folder / "metaspace", legacy=False),
        "embedded": locate("cloister-5m"),
    }
    return {name: Tokenizer(path) for name, path in paths.items()}


KINDS = ["byte-level", "composing", "lacking", "stretching", "sentencepiece", "metaspace", "embedded"]


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(200), deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_bound(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    least = tokenizer._bound.least_tokens(text.replace(MARK, ""))
    for framed in (False, True):
        for special in (False, True):
            assert least <= len(tokenizer.encode(text, framed, parse_special=special))
    assert least <= len(tokenizer.encode(Guard(tokenizer.special).mark(text)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_of_prose_is_not_far_below_its_tokens(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = "It answers the question of what a server is, and more of them than one.\n" * 200
    assert len(tokenizer.encode(text)) / 6 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_runs_of_spaces_have_a_bound_by_the_longest_token(tokenizers):
    tokenizer = tokenizers["embedded"]
    longest = max(len(tokenizer.read_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
    assert tokenizer.least_tokens(" " * longest * 1000) == 1000 - 2


def test_a_token_that_takes_spaces_with_it_leaves_no_bound(tokenizers):
    text = "<mask>" + " " * 10_000
    assert len(tokenizers["stretching"].encode(text)) == 1
    assert tokenizers["stretching"].least_tokens(text) == 0
    assert tokenizers["stretching"].least_tokens("a b " * 5000) > 0


@pytest.mark.parametrize("window_bytes", [999, 1000])
def test_cuts_are_counted_where_windows_meet(tokenizers, monkeypatch, window_bytes):
    monkeypatch.setattr(token_bound, "WINDOW_BYTES", window_bytes)
    text = "a " * 3000
    assert len(tokenizers["embedded"].encode(text)) == 3001
    assert tokenizers["embedded"].least_tokens(text) == 3001 - 2


def test_a_text_that_is_composed_counts_by_its_ascii_only(tokenizers):
    text = "e\u0301" * 10_000
    assert len(tokenizers["composing"].encode(text)) < len(tokenizers["byte-level"].encode(text))
    assert tokenizers["composing"].least_tokens(text) == 0


def test_what_fuses_unknown_letters_has_no_bound(unigram):
    assert unigram.least_tokens("the server " * 5000) == 0


def test_a_byte_that_the_vocabulary_lacks_does_not_count(tokenizers):
    tokenizer = tokenizers["lacking"]
    assert len(tokenizer.encode("q" * 10_000)) == 0
    assert tokenizer.least_tokens("q" * 10_000) == 0
    assert tokenizer.least_tokens("the server " * 5000) > 5000


@pytest.mark.parametrize("change_of", ["removing split", "lower case"])
def test_what_drops_or_changes_text_has_no_bound(tmp_path, change_of):
    path = models.byte_level(tmp_path)
    content = json.loads((path / "tokenizer.json").read_text())
    if change_of == "lower case":
        content["normalizer"] = {"type": "Lowercase"}
    else:
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    (path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer(path).least_tokens("the server " * 5000) == 0


def test_short_and_invalid_texts_have_no_bound(tokenizers):
    assert tokenizers["embedded"].least_tokens("a " * (LONG_TEXT_CHARS // 2 - 1)) == 0
    assert tokenizers["embedded"].least_tokens("a " * LONG_TEXT_CHARS + "\ud800") == 0
