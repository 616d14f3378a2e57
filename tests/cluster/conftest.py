from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.cluster.virtual.byte_tokenizer import open_tokenizer, write_byte_tokenizer
from cloister.text import Tokenizer


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of one token per byte."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return open_tokenizer()


@pytest.fixture
def no_log() -> Iterator[None]:
    """The engines' deaths are the purpose, and no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
