"""Tokenizers of GGUF files are made once and kept."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cloister.text import Tokenizer, gguf
from cloister.text.gguf import TokenizerStore
from tests.gguf_factory import make_gguf

TEXT = "What does the manual say about Ärger, naïve caching, and 3 × 7?\n\n<|user|> ▁"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_gguf(tmp_path / "tiny", "llama", "Q8_0")


@pytest.fixture(autouse=True)
def keep_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.text.gguf._LEAST_BYTES", 0)


def refuse(self: object) -> dict[str, object]:
    raise AssertionError("the vocabulary was read again")


def test_a_second_start_reads_what_the_first_one_made(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, first = Tokenizer(model), Tokenizer(model, kept=tmp_path / "kept")
    monkeypatch.setattr(gguf.GGUFSource, "tokenizer", refuse)
    second = Tokenizer(model, kept=tmp_path / "kept")
    assert made.encode(TEXT, True) == first.encode(TEXT, True) == second.encode(TEXT, True)
    assert second.special == made.special
    assert (second.vocab_size, second.eos_token_id) == (made.vocab_size, made.eos_token_id)
    assert [second.token_bytes(token) for token in range(300)] == [made.token_bytes(token) for token in range(300)]
    (file,) = (tmp_path / "kept").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_damaged_file_is_made_again(model: Path, tmp_path: Path) -> None:
    wanted = Tokenizer(model, kept=tmp_path).encode(TEXT)
    (file,) = tmp_path.glob("*.tokenizer")
    whole = file.read_bytes()
    for damaged in (b"", whole[:1000], whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]):
        file.write_bytes(damaged)
        assert Tokenizer(model, kept=tmp_path).encode(TEXT) == wanted
        assert file.read_bytes() == whole


def test_another_vocabulary_is_another_tokenizer(model: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.gguf"
    content = model.read_bytes()
    assert content.count(b"tokenizer.ggml.eos_token_id") == 1
    place = content.index(b"tokenizer.ggml.eos_token_id") + len(b"tokenizer.ggml.eos_token_id") + 4
    changed.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert Tokenizer(model, kept=tmp_path).eos_token_id != Tokenizer(changed, kept=tmp_path).eos_token_id
    assert len([*tmp_path.glob("*.tokenizer")]) == 2


def test_where_nothing_can_be_written_a_tokenizer_is_made_each_time(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    assert Tokenizer(model, kept=tmp_path / "file").encode(TEXT) == Tokenizer(model).encode(TEXT)


def test_the_oldest_makes_room(tmp_path: Path) -> None:
    store = TokenizerStore(tmp_path)
    made = gguf.TokenizerRecord({}, {}, b"x")
    for number in range(9):
        assert store.save(str(number), made)
        os.utime(store._path(str(number)), (number, number))
    assert store.save("new", made)
    assert store.load("0") is None
    assert store.load("1") is None
    assert store.load("8") == made
