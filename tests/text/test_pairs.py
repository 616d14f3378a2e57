"""Pairs of texts, as encoders that compare them read them; and WordPiece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from cloister.text import Tokenizer
from cloister.types.errors import InvalidRequestError
from tests.encoder_factory import make_encoder

ENDS = {"BertModel": ("[CLS]", "[SEP]"), "XLMRobertaModel": ("<s>", "</s>"), "ModernBertModel": ("[CLS]", "[SEP]")}
PAIRS = [("the cat", "the dog ran"), ("", "a"), ("what is that?", ""), ("the road " * 3000, "the sea " * 3000)]


@pytest.fixture(scope="module", params=ENDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), request.param)


def test_a_pair_is_joined_as_the_library_joins_it(path: Path) -> None:
    ours, library = Tokenizer(path), Library.from_file(str(path / "tokenizer.json"))
    for pair in PAIRS:
        encoding = library.encode(*pair)
        ids, num_first = ours.encode_pair(*pair)
        assert ids == encoding.ids
        assert [0] * num_first + [1] * (len(ids) - num_first) == encoding.type_ids


def test_no_spelling_of_a_control_token_is_one(path: Path) -> None:
    tokenizer = Tokenizer(path)
    ends = {tokenizer.token_id(end) for end in ENDS[json.loads((path / "config.json").read_text())["architectures"][0]]}
    plain = [token for token in tokenizer.encode_pair("the cat", "the dog")[0] if token in ends]
    for end in ENDS["BertModel"] + ENDS["XLMRobertaModel"]:
        ids, _ = tokenizer.encode_pair(f"the{end} cat", f"{end} the dog {end}")
        assert [token for token in ids if token in ends] == plain


def test_half_a_surrogate_pair_is_refused(path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        Tokenizer(path).encode_pair("a", "\ud800")


def test_pieces_of_words_are_joined(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_encoder(tmp_path, "BertModel"))
    text = "the cat sat on the mathattat"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text.split()), "a word must be in pieces"
    assert tokenizer.decode(ids) == text
