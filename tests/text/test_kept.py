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
    plain = made.encode(TEXT, parse_special=False)
    monkeypatch.setattr(gguf.GGUFSource, "_convert", refuse)
    second = Tokenizer(model, kept=tmp_path / "kept")
    assert made.encode(TEXT, True) == first.encode(TEXT, True) == second.encode(TEXT, True)
    assert second.special == made.special
    assert (second.vocab_size, second.eos_token_id) == (made.vocab_size, made.eos_token_id)
    assert [second.token_bytes(token) for token in range(300)] == [made.token_bytes(token) for token in range(300)]
    assert second.encode(TEXT, parse_special=False) == plain
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


def write_changed(model: Path, path: Path) -> Path:
    """Writes the model with another token that ends an answer."""
    content = model.read_bytes()
    assert content.count(b"tokenizer.ggml.eos_token_id") == 1
    place = content.index(b"tokenizer.ggml.eos_token_id") + len(b"tokenizer.ggml.eos_token_id") + 4
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    return path


def test_another_vocabulary_is_another_tokenizer(model: Path, tmp_path: Path) -> None:
    changed = write_changed(model, tmp_path / "changed.gguf")
    assert Tokenizer(model, kept=tmp_path).eos_token_id != Tokenizer(changed, kept=tmp_path).eos_token_id
    assert len([*tmp_path.glob("*.tokenizer")]) == 2


def refuse_parsing(*_: object) -> object:
    raise AssertionError("the vocabulary was parsed")


def test_an_engine_parses_no_vocabulary_at_a_second_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tokenizer(model)
    Tokenizer(model, kept=tmp_path, defers=True)
    second = Tokenizer(model, kept=tmp_path, defers=True)
    with monkeypatch.context() as patched:
        patched.setattr("cloister.text.tokenizer._build", refuse_parsing)
        third = Tokenizer(model, kept=tmp_path, defers=True)
        for token in range(-1, made.vocab_size + 1):
            assert third.token_bytes(token) == made.token_bytes(token)
        assert third.vocab_size == made.vocab_size
        assert third.decode(made.encode(TEXT)) == made.decode(made.encode(TEXT))
        with pytest.raises(AssertionError, match="parsed"):
            third.encode(TEXT)
    assert second.encode(TEXT, True) == made.encode(TEXT, True)
    assert second.digest() == made.digest()


def test_damaged_texts_of_tokens_are_made_again(model: Path, tmp_path: Path) -> None:
    made = Tokenizer(model, kept=tmp_path, defers=True)
    (file,) = tmp_path.glob("*.tokens")
    whole = file.read_bytes()
    for damaged in (b"", whole[:1000], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        file.write_bytes(damaged)
        again = Tokenizer(model, kept=tmp_path, defers=True)
        assert [*map(again.token_bytes, range(made.vocab_size))] == [*map(made.token_bytes, range(made.vocab_size))]
        assert file.read_bytes() == whole


def test_texts_are_of_one_vocabulary_and_one_version_of_the_library(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tokenizer(model, kept=tmp_path, defers=True)
    Tokenizer(write_changed(model, tmp_path / "changed.gguf"), kept=tmp_path, defers=True)
    assert len([*tmp_path.glob("*.tokens")]) == 2
    monkeypatch.setattr("tokenizers.__version__", "0.0.1")
    Tokenizer(model, kept=tmp_path, defers=True)
    assert len([*tmp_path.glob("*.tokens")]) == 3


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
