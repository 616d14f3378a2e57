import pytest

from cloister.text import Tokenizer
from tests.text import models


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    return Tokenizer(models.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory):
    return Tokenizer(models.sentence_piece(tmp_path_factory.mktemp("sentence_piece")))


@pytest.fixture(scope="session")
def unigram(tmp_path_factory):
    return Tokenizer(models.unigram(tmp_path_factory.mktemp("unigram")))
