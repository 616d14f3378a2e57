"""Engine hosts for tests: processes of this machine, and a network between them and the front that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cloister.cluster.remote.host_process import HostProcess
from cloister.cluster.remote.placement import Place
from cloister.cluster.remote.transport import RemoteTransport
from cloister.engine import EngineClient, Supervision
from cloister.engine.identity import Identity
from cloister.engine.supervision import Restarts
from tests.engine.replica import make_config


class Network:
    """Forwards connections to a port. Keeps what the client sent over each.

    Attributes:
        is_cut: connections stay open, and nothing passes; new ones wait.
        connections: the bytes that came from each client.
    """

    def __init__(self, port: int) -> None:
        self.is_cut = False
        self.connections: list[bytearray] = []
        self.port = 0
        self._target = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def break_connections(self) -> None:
        """Resets every open connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.break_connections()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        kept = bytearray()
        self.connections.append(kept)
        for source, sink, keep in ((reader, far_writer, kept), (far_reader, writer, bytearray())):
            task = asyncio.create_task(self._pass_on(source, sink, keep))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, keep: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                while self.is_cut:
                    await asyncio.sleep(0.01)
                keep += data
                sink.write(data)
                await sink.drain()
        sink.close()


class LocalPlacement:
    """Runs a host on this machine, behind a network (protocol `Placement`)."""

    def __init__(self, front: str) -> None:
        self.process: HostProcess | None = None
        self.network: Network | None = None
        self.num_starts = 0
        self.shown: str | None = None
        self._front = front
        self._networks: list[Network] = []
        self._processes: list[HostProcess] = []

    async def start(self) -> Place:
        if self.process is None:
            self.process = await HostProcess.start(self._front, "127.0.0.1")
            self._processes.append(self.process)
            self.num_starts += 1
            self.network = Network(self.process.report.port)
            self._networks.append(self.network)
            await self.network.open()
        assert self.network is not None
        return Place("127.0.0.1", self.network.port, self.shown or self.process.report.certificate)

    async def wait_ended(self) -> str:
        process = self.process
        assert process is not None
        how = await process.wait()
        if self.process is process:
            self.process = None
        return how

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None

    async def close(self) -> None:
        for process in self._processes:
            process.kill()
            await process.wait()
        for network in self._networks:
            await network.close()


@dataclasses.dataclass
class Remote:
    """A client of an engine behind a network, and what it is made of."""

    client: EngineClient
    transport: RemoteTransport
    placement: LocalPlacement

    @property
    def network(self) -> Network:
        assert self.placement.network is not None
        return self.placement.network


def make_remote(path: Path, entry: str = "build", first_step_s: float = 30.0, **changes: object) -> Remote:
    """Returns a client whose engine is built by a function of `tests.engine.replica`."""
    identity = Identity.make()
    placement = LocalPlacement(identity.certificate)
    supervision = Supervision(
        start_timeout_s=300.0, first_step_timeout_s=first_step_s, look_every_s=0.1, restarts=Restarts(backoff_s=0.01)
    )
    transport = RemoteTransport(
        placement, identity, f"tests.engine.replica:{entry}", supervision=supervision, import_path=[p for p in sys.path if p]
    )
    return Remote(EngineClient(transport, make_config(path, **changes)), transport, placement)


@asynccontextmanager
async def serving(path: Path, entry: str = "build", first_step_s: float = 30.0, **changes: object) -> AsyncIterator[Remote]:
    remote = make_remote(path, entry, first_step_s, **changes)
    try:
        await remote.client.start()
        yield remote
    finally:
        await remote.client.drain(0.0)
        await remote.placement.close()
