from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.running_server import RunningServer, serving, start_speaking, start_thinking, write_model


@pytest.fixture(scope="session", autouse=True)
def images_may_last() -> Iterator[None]:
    """Each image is decoded by a process of its own, which takes long to start on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cloister.server.image_decoding.DEADLINE_S", 300.0)
        yield


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("server_model"))


@pytest.fixture(scope="session")
def speaking(model_path: Path) -> Iterator[RunningServer]:
    """A server whose model always says "Größe: 5 €. " again and again."""
    with serving(model_path, lambda: start_speaking(model_path)) as server:
        yield server


@pytest.fixture(scope="session")
def thinking(model_path: Path) -> Iterator[RunningServer]:
    """A server with a real runner, for log-probabilities and sampling."""
    with serving(model_path, lambda: start_thinking(model_path)) as server:
        yield server


@pytest.fixture(scope="session")
def client(speaking: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=speaking.url, timeout=300) as client:
        yield client
