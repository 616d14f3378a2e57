"""Text that comes token by token is the text of all tokens at once, and never holds half a character."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.text import Detokenizer
from tests.thinning import examples

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
mixed_text = st.one_of(unicode_text, st.text(alphabet=" ▁aé東😀\n<>|the", max_size=40))


def stream(tokenizer, ids, cut=1, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    pieces = [detokenizer.push(ids[i : i + cut]) for i in range(0, len(ids), cut)]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=examples(100), deadline=None)
@given(text=mixed_text, cut=st.integers(1, 4))
def test_byte_level_text_comes_back_whole(byte_level, text, cut):
    ids = byte_level.encode(text, parse_special=False)
    pieces = stream(byte_level, ids, cut)
    assert "".join(pieces) == text == byte_level.decode(ids) == byte_level._tokenizer.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_byte_level_tokens_decode_as_the_library_says(byte_level, data, skip):
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=30))
    expected = byte_level._tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(byte_level, ids, skip_special_tokens=skip)) == expected


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_a_token_pushed_alone_has_the_text_that_it_has_in_a_list(kind, data, skip, request):
    tokenizer = request.getfixturevalue(kind)
    tokens = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=20)
    ids, prompt = data.draw(tokens), data.draw(tokens)
    alone, listed = (Detokenizer(tokenizer, skip_special_tokens=skip, prompt_ids=prompt) for _ in range(2))
    assert [alone.push_token(i) for i in ids] == [listed.push([i]) for i in ids]
    assert alone.flush() == listed.flush()


@settings(max_examples=examples(100), deadline=None)
@given(text=mixed_text, cut=st.integers(1, 4))
def test_sentence_piece_text_comes_back_whole(sentence_piece, text, cut):
    text = text.replace("▁", "_")  # which is a space to SentencePiece
    ids = sentence_piece.encode(text, parse_special=False)
    assert "".join(stream(sentence_piece, ids, cut)) == text == sentence_piece._tokenizer.decode(ids)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_random_sentence_piece_tokens_decode_as_the_library_says(sentence_piece, data):
    """Byte tokens stand in whole characters here; the library turns a whole run of them to U+FFFD if any is wrong."""
    character = st.characters(exclude_categories=["Cs"]).map(
        lambda char: [sentence_piece.token_id(f"<0x{byte:02X}>") for byte in char.encode()]
    )
    piece = st.integers(0, sentence_piece.vocab_size + 3).filter(lambda i: not 3 <= i < 259).map(lambda i: [i])
    ids = [i for part in data.draw(st.lists(st.one_of(piece, character), max_size=20)) for i in part]
    assert "".join(stream(sentence_piece, ids)) == sentence_piece._tokenizer.decode(ids)


def test_a_character_of_byte_tokens_comes_as_soon_as_it_is_whole(sentence_piece):
    ids = [sentence_piece.token_id(f"<0x{byte:02X}>") for byte in "東京".encode()]
    assert stream(sentence_piece, ids) == ["", "", "東", "", "", "京", ""]


def test_bytes_cut_short_become_one_replacement_character(byte_level, sentence_piece):
    for tokenizer in (byte_level, sentence_piece):
        by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        ids = [by_byte[bytes([byte])] for byte in "😀".encode()[:3]]
        assert stream(tokenizer, ids) == ["", "", "", "\ufffd"]
        assert stream(tokenizer, [*ids, by_byte[b"a"]]) == ["", "", "", "\ufffda", ""]


def test_a_leading_space_is_the_tokenizers_own_at_the_start_of_a_text_only(sentence_piece):
    ids = sentence_piece.encode("the server")
    assert sentence_piece.token_bytes(ids[0]) == b" the"
    assert "".join(stream(sentence_piece, ids)) == "the server"
    prompt = sentence_piece.encode("What is", add_special_tokens=True)
    assert "".join(stream(sentence_piece, ids, prompt_ids=prompt)) == " the server"
    assert "".join(stream(sentence_piece, ids, prompt_ids=[1])) == "the server"


def test_a_character_that_the_prompt_left_open_is_finished(byte_level):
    by_byte = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    ids = [by_byte[bytes([byte])] for byte in "ab😀".encode()]
    assert stream(byte_level, ids[4:], prompt_ids=ids[:4]) == ["", "😀", ""]
    assert stream(byte_level, ids[2:], prompt_ids=ids[:2])[:4] == ["", "", "", "😀"]


def test_control_tokens_have_text_only_when_asked_for(byte_level):
    ids = byte_level.encode("<|im_start|>hi<|im_end|>")
    assert "".join(stream(byte_level, ids)) == "hi"
    assert "".join(stream(byte_level, ids, skip_special_tokens=False)) == "<|im_start|>hi<|im_end|>"


def test_metaspace_text_comes_back_whole(unigram):
    ids = unigram.encode("the server serves.")
    assert "".join(stream(unigram, ids)) == "the server serves." == unigram._tokenizer.decode(ids)


@pytest.mark.parametrize("length", [2_000, 20_000])
def test_the_state_stays_small(byte_level, length):
    detokenizer = Detokenizer(byte_level)
    ids = random.Random(0).choices(range(400), k=length)
    for token_id in ids:
        detokenizer.push([token_id])
        assert len(detokenizer._open) < 4


def test_a_control_token_that_is_asked_for_is_text_and_no_other_is(byte_level):
    start, end = (byte_level.token_id(text) for text in ("<|im_start|>", "<|im_end|>"))
    ids = [start, *byte_level.encode("hello"), end]
    detokenizer = Detokenizer(byte_level, shown=(start,))
    assert detokenizer.push(ids) + detokenizer.flush() == "<|im_start|>hello"
