from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.trust.shape import shape_of
from tests.client.world import NODES, World
from tests.memory import memory_directory
from tests.memory import tmp_path as tmp_path
from tests.private.real_server import RealServer
from tests.sealed_cloud import LoopbackCloud, open_cloud


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as directory:
        yield directory


@pytest.fixture
def world(directory: Path) -> Iterator[World]:
    """A sealed cloud of two nodes in this process."""
    world = World(directory / "cloud")
    asyncio.run(world.cloud.enter(NODES))
    yield world
    world.cloud.close()


@pytest.fixture(scope="session")
def server() -> RealServer:
    """The server behind the nodes of `cloud`."""
    return RealServer()


@pytest.fixture(scope="session")
def cloud(server: RealServer) -> Iterator[LoopbackCloud]:
    """One sealed cloud with the embedded model for every test that only asks."""
    with open_cloud(server, num_nodes=2, is_live=True, shape=shape_of("private")) as cloud:
        yield cloud
        server.close()
