from __future__ import annotations

from pathlib import Path

import pytest

from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from tests.engine.kv_fixtures import patience as patience
from tests.engine.kv_fixtures import tokenizer as tokenizer


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of one token per byte."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))
