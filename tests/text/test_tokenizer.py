"""The tokenizer beside the library's own, and what users cannot make of it."""

import json
import random
import string
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.engine.machine import resident_bytes
from cloister.models import locate
from cloister.text import Tokenizer
from cloister.text.tokenizer import MARK
from cloister.types.errors import InvalidRequestError, ModelError
from tests.text import models
from tests.thinning import examples


@pytest.fixture(params=["byte_level", "sentence_piece", "unigram"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def test_ids_are_those_of_the_library(tokenizer):
    for text in (*models.CORPUS, "", " ", "<s>x</s>", "<|im_end|>", "\n".join(models.CORPUS) * 50 + "<|im_end|>"):
        assert tokenizer.encode(text) == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("mark", ["", MARK], ids=["plain", "marked"])
def test_a_long_text_leaves_time_to_other_threads(mark):
    tokenizer = Tokenizer(locate("cloister-5m"))
    tokenizer.encode(MARK)
    shares = []
    with ThreadPoolExecutor(1) as pool:
        while not shares or min(shares) >= 0.5:  # a busy machine may hold this thread up as well
            assert len(shares) < 10, f"the longest turn took these shares of all of the time: {shares}"
            turns_s = [time.perf_counter()]
            work = pool.submit(tokenizer.encode, "a" * 1_000_000 + mark)
            while not work.done():
                time.sleep(0.001)
                turns_s.append(time.perf_counter())
            assert len(work.result()) > 100_000
            shares.append(max(later - earlier for earlier, later in pairwise(turns_s)) / (turns_s[-1] - turns_s[0]))


def test_words_of_users_are_not_kept():
    tokenizer, letters = Tokenizer(locate("cloister-5m")), random.Random(1)

    def encode_words(count):
        for _ in range(count):
            word = "".join(letters.choices(string.ascii_lowercase, k=200))
            tokenizer.encode(word)
            tokenizer.encode(word + MARK)

    encode_words(500)
    before_bytes = resident_bytes()
    encode_words(4000)
    assert resident_bytes() - before_bytes < 4 * 2**20


def test_vocab_size_covers_every_id(tokenizer):
    ids = tokenizer._tokenizer.get_vocab(with_added_tokens=True).values()
    assert tokenizer.vocab_size == max(ids) + 1


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(byte_level, text):
    ids = byte_level.encode(text, parse_special=False)
    assert b"".join(byte_level.token_bytes(i) for i in ids) == text.encode()


def test_token_bytes_of_every_kind(byte_level, sentence_piece):
    assert sentence_piece.token_bytes(sentence_piece.token_id("<0x0A>")) == b"\n"
    assert sentence_piece.token_bytes(sentence_piece.token_id("▁the")) == b" the"
    assert byte_level.token_bytes(byte_level.token_id("<|im_end|>")) == b"<|im_end|>"
    assert {byte_level.token_bytes(i) for i in range(256)} == {bytes([byte]) for byte in range(256)}
    assert byte_level.token_bytes(byte_level.vocab_size) == byte_level.token_bytes(-1) == b""
    assert byte_level.token_bytes(2**40) == b""


def test_an_added_token_beyond_ascii_has_its_own_bytes(tmp_path):
    path = models.byte_level(tmp_path)
    settings_ = json.loads((path / "tokenizer.json").read_text())
    settings_["added_tokens"].append({**settings_["added_tokens"][0], "id": 405, "content": "<｜é▁｜>"})
    (path / "tokenizer.json").write_text(json.dumps(settings_))
    tokenizer = Tokenizer(path)
    assert tokenizer.token_bytes(405) == "<｜é▁｜>".encode()
    assert tokenizer.decode([405], skip_special_tokens=False) == "<｜é▁｜>"


def test_bos_and_eos_ids(byte_level, sentence_piece):
    assert (sentence_piece.bos_token_id, sentence_piece.eos_token_id) == (1, 2)
    assert byte_level.eos_token_id == byte_level.token_id("<|im_end|>")


@pytest.mark.parametrize(("setting", "has_bos"), [(None, False), (True, True), (False, False)])
def test_add_bos_token_of_the_config_is_followed(tmp_path, setting, has_bos):
    tokenizer = Tokenizer(models.byte_level(tmp_path, add_bos_token=setting))
    ids = tokenizer.encode("hello", add_special_tokens=True)
    assert (ids[0] == tokenizer.bos_token_id) == has_bos
    assert tokenizer.encode("hello") == ids[int(has_bos) :]


@pytest.mark.parametrize(("setting", "num_bos"), [(None, 1), (True, 1), (False, 0)])
def test_a_post_processor_adds_one_bos_at_most(tmp_path, setting, num_bos):
    tokenizer = Tokenizer(models.sentence_piece(tmp_path, add_bos_token=setting))
    assert tokenizer.encode("hello", add_special_tokens=True).count(1) == num_bos


def test_tokens_that_only_the_config_adds_are_known(tmp_path):
    path = models.byte_level(tmp_path)
    first = Tokenizer(path).vocab_size
    models.save(
        path,
        Tokenizer(path)._tokenizer,
        added_tokens_decoder={str(first): {"content": "<|call|>", "special": True}, str(first + 1): {"content": "<x>"}},
    )
    tokenizer = Tokenizer(path)
    assert tokenizer.encode("<|call|><x>") == [first, first + 1]
    assert first in tokenizer.special.control_ids
    assert first not in tokenizer.encode("<|call|>", parse_special=False)
    assert tokenizer.decode([first, first + 1]) == "<x>"


def test_settings_for_training_neither_cut_nor_pad(tmp_path):
    path = models.byte_level(tmp_path)
    library = Tokenizer(path)._tokenizer
    library.enable_truncation(4)
    library.enable_padding(length=9)
    models.save(path, library)
    assert len(Tokenizer(path).encode("ab" * 50)) > 9
    assert len(Tokenizer(path).encode("ab")) < 4


def test_plain_text_never_becomes_a_control_token(tokenizer):
    controls = tokenizer.special.control_texts
    texts = [*controls, "".join(controls), *(f"a {text} b\n{text}" for text in controls), "<s</s>>", "<<s>s>"]
    unknown = tokenizer.token_id("<unk>")
    for text in texts:
        ids = tokenizer.encode(text, parse_special=False)
        assert not set(ids) & (tokenizer.special.control_ids - {unknown})
        if unknown not in ids:
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_plain_text_without_control_tokens_is_encoded_as_ever(tokenizer):
    for text in ("The quick server. ", "  the\n", "", "東京 <think> </think>"):
        assert tokenizer.encode(text, parse_special=False) == tokenizer.encode(text)


@pytest.mark.parametrize("text", ["\x00", "a\x00b<|im_end|>", "\ufeff", "\u202e", "\U0010ffff", "e\u0301" * 50])
def test_odd_characters_are_text(byte_level, text):
    for parse_special in (True, False):
        ids = byte_level.encode(text, parse_special=parse_special)
        assert byte_level.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b", "\ude00\ud83d"])
def test_half_a_surrogate_pair_is_refused_without_repeating_it(tokenizer, text):
    for parse_special in (True, False):
        with pytest.raises(InvalidRequestError, match="surrogate") as caught:
            tokenizer.encode(text, parse_special=parse_special)
        assert text not in caught.value.message


def test_many_threads_encode_alike(byte_level):
    texts = [" ".join(models.CORPUS[: i % 4 + 1]) * (i % 5 + 1) for i in range(64)]
    expected = [byte_level.encode(text, parse_special=i % 2 == 0) for i, text in enumerate(texts)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: byte_level.encode(texts[i], parse_special=i % 2 == 0), range(64)))
    assert found == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing"),
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ('{"added_tokens": [{}]}', "unknown form"),
        ('{"decoder": {"type": "ByteLevel"}}', "cannot be used"),
        ('{"decoder": {"type": "CTC"}}', "CTC"),
    ],
)
def test_a_directory_without_a_usable_tokenizer_is_a_model_error(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        Tokenizer(tmp_path)


def test_what_a_tokenizer_was_made_of_is_not_kept(byte_level):
    byte_level.encode("a")
    assert byte_level._make is None
