"""What the tests that need a GPU share: without one each is skipped, and says so."""

from __future__ import annotations

import pytest

from tests.device import HAS_GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test here `gpu`, and skips it where there is no device."""
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not HAS_GPU:
                item.add_marker(pytest.mark.skip(reason="there is no NVIDIA device here (no /dev/nvidiactl)"))
