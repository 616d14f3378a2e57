"""Directories in memory, for logs and stores: they wait for the disk at every step, and their tests are not about disks.

A `conftest.py` that imports `tmp_path` from here gives it to the tests of its directory.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory; on disk where there is no such place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as directory:
        yield directory
