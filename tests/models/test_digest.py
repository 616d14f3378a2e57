"""Digests of model files are remembered where only their owner can read which models there are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloister.models import location
from cloister.models.location import Digests


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(location, "_WORTH_REMEMBERING_BYTES", 0)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    return file


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests.json"


def test_only_their_owner_may_read_what_is_remembered(model: Path, known: Path) -> None:
    before = os.umask(0)
    try:
        Digests(known).of(model)
    finally:
        os.umask(before)
    assert known.stat().st_mode & 0o777 == 0o600
    assert known.parent.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in known.parent.iterdir()] == ["digests.json"]


def test_a_file_that_others_could_read_is_replaced_by_one_that_they_cannot(model: Path, known: Path) -> None:
    known.parent.mkdir()
    known.write_text("{}")
    known.chmod(0o644)
    Digests(known).of(model)
    assert known.stat().st_mode & 0o777 == 0o600


def test_what_is_remembered_is_not_hashed_again(model: Path, known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Digests(known).of(model)
    monkeypatch.delattr("hashlib.file_digest")
    assert Digests(known).of(model) == expected
