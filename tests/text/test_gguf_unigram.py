"""Unigram tokenizers of GGUF files beside the SentencePiece models that they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType

from cloister.text import Tokenizer
from cloister.text.sentencepiece import SentencePieceFile, read_model
from cloister.types.errors import ModelError
from tests.text.test_sentencepiece import GEMMA, LLAMA, PLAIN, SYMBOLS, TEXTS, train, write

KINDS = {"plain": PLAIN, "symbols": SYMBOLS, "llama": LLAMA, "gemma": GEMMA}


def to_gguf(path: Path, model: SentencePieceFile, charsmap: bytes | list[int] | None = None, num_empty: int = 2) -> Path:
    writer = GGUFWriter(path, "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list([*(piece.text for piece in model.pieces), *(f"[PAD{number}]" for number in range(num_empty))])
    writer.add_token_types([*(int(piece.kind) for piece in model.pieces), *([TokenType.UNUSED] * num_empty)])
    writer.add_token_scores([*(piece.score for piece in model.pieces), *([-10000.0] * num_empty)])
    writer.add_add_space_prefix(model.adds_prefix)
    writer.add_bool("tokenizer.ggml.remove_extra_whitespaces", model.removes_spaces)
    if table := model.charsmap if charsmap is None else charsmap:
        writer.add_precompiled_charsmap(table)
    writer.add_bos_token_id(model.bos_id or 0)
    writer.add_eos_token_id(model.eos_id or 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", KINDS)
def test_every_text_becomes_the_pieces_of_the_model(name: str, tmp_path: Path) -> None:
    data = train("unigram", **KINDS[name])
    ours, theirs = Tokenizer(to_gguf(tmp_path / "model.gguf", read_model(data))), Tokenizer(write(tmp_path / "model", data))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)), text
    assert ours.encode("a", add_special_tokens=True)[-1] == ours.eos_token_id


@pytest.mark.parametrize("charsmap", [b"\xff\xff\xff\x7f\0\0", [4, 0, 0, 0, 0, 0]], ids=["too small", "other numbers"])
def test_a_damaged_table_is_told(charsmap: bytes | list[int], tmp_path: Path) -> None:
    file = to_gguf(tmp_path / "model.gguf", read_model(train("unigram", **PLAIN)), charsmap)
    with pytest.raises(ModelError, match=r"the tokenizer of model\.gguf is damaged"):
        Tokenizer(file)
