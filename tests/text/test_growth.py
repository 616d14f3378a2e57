"""The time of a text grows with its length, not with its square: whatever a client sends, for each kind of tokenizer.

A call of the library cannot be interrupted, so a text of 4 MB whose time is quadratic would hold a thread for hours.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Library

from cloister.text import Tokenizer
from cloister.text.spelling import SPLITS, TRAILING_SPACE
from tests.encoder_factory import make_encoder
from tests.text import models
from tests.text.test_gguf import byte_level_with, to_gguf
from tests.text.test_sentencepiece import LLAMA, PLAIN, train, write

NUM_CHARS = 2000
FACTOR = 8
MOST = 3 * FACTOR
"""Times the processor time of a text that is `FACTOR` times as long. What is quadratic takes `FACTOR` squared, 64 times."""
LEAST_S = 0.001
"""Less than this is not measured well, and counts as this much."""
NUM_TURNS, MOST_TURNS = 3, 60
"""A busy machine disturbs some turns: the least of all counts, and there are more of them until it is little enough. What is
quadratic never is."""
TEXTS: dict[str, Callable[[int], str]] = {
    "one word": lambda n: "zqxj" * (n // 4),
    "words of 100 letters": lambda n: ("a" * 100 + " ") * (n // 101),
    "spaces": lambda n: " " * n,
    "spaces before a letter": lambda n: "a" + " " * n + "b",
    "spaces before what no expression names": lambda n: "a" + " " * n + "東😀\x01",
    "tabs and lines": lambda n: "a" + "\t\r\n " * (n // 4) + "b",
    "digits": lambda n: "7" * n,
    "accents": lambda n: "e" + "\u0301" * n,
    "syllables": lambda n: "\u0915\u094d" * (n // 2),
    "capitals": lambda n: "A\u0301" * (n // 2),
    "signs": lambda n: "'!" * (n // 2),
    "spellings of bytes": lambda n: "<0x" * (n // 3),
    "a control token": lambda n: "<|im_end|></s>" * (n // 14),
}


def deepseek(path: Path) -> Path:
    """As the tokenizer.json of DeepSeek's first models: the fourth of its expressions."""
    models.byte_level(path)
    content = json.loads((path / "tokenizer.json").read_text())
    cut = {"type": "Split", "pattern": {"Regex": r"\s+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, content["pre_tokenizer"]]}
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def distinct_splits() -> list[str]:
    """One name for each way to cut a text that a GGUF file may name."""
    return list({split: name for name, split in reversed(SPLITS.items())}.values())


KINDS: dict[str, Callable[[Path], Path]] = {
    **{f"split {name}": lambda path, name=name: to_gguf(byte_level_with(path, name), pre=name) for name in distinct_splits()},
    "DeepSeek's tokenizer.json": deepseek,
    "WordPiece": lambda path: make_encoder(path, "BertModel"),
    "unigram, words": models.unigram,
    "unigram, one word": lambda path: write(path, train("unigram", **PLAIN)),
    "unigram, bytes": lambda path: write(path, train("unigram", **LLAMA)),
    "BPE of SentencePiece": lambda path: write(path, train("bpe", **PLAIN)),
    "BPE of Llama": lambda path: models.sentence_piece(path),
}


def measure(tokenizer: Tokenizer, text: str) -> float:
    """Seconds of processor time that tokens of a text take."""
    start = time.process_time()
    tokenizer.encode(text, parse_special=False)
    return time.process_time() - start


def grows_as_its_length(tokenizer: Tokenizer, make: Callable[[int], str]) -> bool:
    """Whether a text that is `FACTOR` times as long takes less than `MOST` times as long, each in its best turn."""
    short_s = long_s = math.inf
    for turn in range(MOST_TURNS):
        short_s = min(short_s, measure(tokenizer, make(NUM_CHARS)))
        long_s = min(long_s, measure(tokenizer, make(NUM_CHARS * FACTOR)))
        if turn + 1 >= NUM_TURNS and long_s < MOST * max(short_s, LEAST_S):
            return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_the_time_of_a_text_grows_as_its_length(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(KINDS[kind](tmp_path / "model"))
    for name, make in TEXTS.items():
        assert grows_as_its_length(tokenizer, make), name


def test_trailing_spaces_are_found_where_the_published_expression_finds_them(tmp_path: Path) -> None:
    library = Library.from_file(str(deepseek(tmp_path / "model") / "tokenizer.json"))
    published, ours = (pre_tokenizers.Split(Regex(each), "isolated") for each in (r"\s+$", TRAILING_SPACE))
    parts = ("a", " ", "\n", "\r", "\t", "\u3000", "\u2028", "\x85", "東")
    for text in map("".join, itertools.product(parts, repeat=4)):
        assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text)
    ours_all = Tokenizer(tmp_path / "model")
    for make in TEXTS.values():
        assert ours_all.encode(make(60)) == library.encode(make(60), add_special_tokens=False).ids


@pytest.mark.parametrize("num_letters", [99, 100, 101, 5000])
def test_a_word_of_more_than_a_hundred_letters_is_unknown_to_word_piece(num_letters: int, tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "model", "BertModel")
    tokenizer, library = Tokenizer(path), Library.from_file(str(path / "tokenizer.json"))
    word = "at" * (num_letters // 2) + "a" * (num_letters % 2)
    ids = tokenizer.encode(f"the {word} cat")
    assert ids == library.encode(f"the {word} cat", add_special_tokens=False).ids
    assert (tokenizer.token_id("[UNK]") in ids) == (num_letters > 100)
