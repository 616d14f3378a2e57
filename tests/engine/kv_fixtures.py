"""Fixtures of tests in which engines give each other KV; the conftest of their directory has them."""

from __future__ import annotations

import pytest

from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from cloister.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte."""
    return Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time: only tests of deadlines have one."""
    for module in ("scheduler.kv_load", "scheduler.kv_exports", "engine.kv_transfer", "engine.kv_sockets"):
        monkeypatch.setattr(f"cloister.{module}.KV_LOAD_TIMEOUT_S", 300.0)
        monkeypatch.setattr(f"cloister.{module}.FOLLOW_TIMEOUT_S", 300.0)
