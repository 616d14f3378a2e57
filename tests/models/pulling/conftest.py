"""A store of one's own, a package index on loopback, and a small model."""

from __future__ import annotations

import pytest

from tests.gguf_factory import make_gguf
from tests.package_index import index, store

__all__ = ["gguf", "index", "store"]


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "tiny", "llama", "Q4_0").read_bytes()
