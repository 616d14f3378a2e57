from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.street import Street, open_street


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory where there is such a place: stores and log wait for the disk at every step."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def street() -> Iterator[Street]:
    """One private cloud with the embedded model for every test that only asks."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory,
        open_street(Path(directory)) as street,
    ):
        yield street
