"""A store of one's own, a package index on loopback, and a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.models.pulling import Store
from tests.gguf_factory import make_gguf
from tests.package_index import Index, package_index


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "tiny", "llama", "Q4_0").read_bytes()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with package_index(monkeypatch) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("HOME", str(tmp_path))
    return Store()
