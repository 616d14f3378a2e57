"""The machines of a sealed unit in virtual time: the parts of a node's front that keep a unit together, its engines and its
zygote are those of production, put together as `launch.sealed` does."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Final, Protocol

import msgspec

from cloister.cluster.replica_states import ClusterConfig
from cloister.cluster.routers import ROUTERS, Router
from cloister.cluster.routers.base import RouterContext
from cloister.cluster.sealed_unit import DRAWN, SealedUnit, connect_engines
from cloister.cluster.virtual.engine import VirtualEngine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.engine import EngineClient, RequestClient, SealedWorkerTransport
from cloister.engine.supervision import Restarts, Supervision
from cloister.kv import PrefixKeys
from cloister.private.attesting import Announcer
from cloister.private.unit.carriers import LeaderCarriers, MemberCarriers
from cloister.private.unit.membership import UnitLeader, UnitListing, UnitPort, UnitSide
from cloister.private.unit.pairing import UnitKey
from cloister.private.unsealing import LocalUnsealer
from cloister.private.virtual.engine_process import UnitTransport
from cloister.private.virtual.event_loop import SocketEventLoop, on_clock
from cloister.private.virtual.tcp import HOST, Address
from cloister.private.workers.channel_broker import ChannelBroker, ChannelSource
from cloister.private.workers.zygote import LIFE_MARGIN_S, Zygote, engine_listener
from cloister.trust.attestation import Statement, read_evidence, read_statement
from cloister.trust.attestation.measuring import measure_profile
from cloister.trust.attestation.node import Facts
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.sealing import NODE_KEY_LIFE_S, KeyRing, Receiver, ReplayCache
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.errors import CloisterError
from cloister.types.events import FrontMessage
from cloister.types.request import ModelInfo

UNIT_PORT: Final = 9100
EPOCH_S: Final = 1_750_000_000.0
"""Unix time when a run begins."""
START_TIMEOUT_S: Final = 600.0
LOOK_S: Final = 1.0
PING_S: Final = 15.0
"""A front looks at its engines, and asks one that is silent, more seldom than in production: most of a run is idle."""
NUM_RESTARTS: Final = 20
"""More than faults and requests that kill can use up, so that no front gives an engine up."""
MODEL_DIGEST: Final = "0b" * 32
RELEASE: Final = "0a" * 32


class UnitWatcher(Protocol):
    """What hears of a unit while it runs."""

    def note_failure(self, life: NodeLife) -> None:
        """A node has not started, and ends."""

    def note_statement(self, life: NodeLife, statement: Statement) -> None:
        """A leader has stated something."""

    def note_message(self, life: NodeLife, engine: int, message: FrontMessage) -> None:
        """An engine was sent something."""


class _Stating:
    """A node's part in its unit, of which a watcher hears."""

    def __init__(self, side: UnitSide, note: Callable[[Statement], None]) -> None:
        self.key = side.key
        self._side, self._note = side, note

    def list_members(self) -> UnitListing:
        return self._side.list_members()

    def take_evidence(self, document: bytes) -> None:
        self._side.take_evidence(document)
        self._note(read_statement(read_evidence(document).statement))


class _WatchedBroker(ChannelBroker):
    """A broker that answers in the turns of an event loop: a byte in its control socket ends each wait."""

    def __init__(self, open_channel: Callable[[int], tuple[socket.socket, bytes]], control: socket.socket) -> None:
        super().__init__(open_channel, control)
        self._loop = asyncio.get_running_loop()

    @property
    def num_workers(self) -> int:
        return len(self._watched) - 1  # one is its control socket

    @property
    def _watched(self) -> list[socket.socket]:
        return [key.fileobj for key in self._selector.get_map().values() if isinstance(key.fileobj, socket.socket)]

    def admit(self) -> socket.socket:
        with on_clock(self._loop):
            far = super().admit()
        near = self._watched[-1]
        self._loop.add_reader(near, self._answer_all, near, near.fileno())
        return far

    def _answer_all(self, near: socket.socket, descriptor: int) -> None:
        with on_clock(self._loop):
            self.serve()
        if near.fileno() < 0:
            self._loop.remove_reader(descriptor)

    def close(self) -> None:
        for sock in self._watched:
            self._loop.remove_reader(sock)
        super().close()


class UnitZygote(Zygote):
    """A zygote whose workers are tasks."""

    def __init__(self) -> None:
        self._far, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._far.send(b".")
        super().__init__(near, None, 0.0)  # type: ignore[arg-type]
        self.broker = self._broker = _WatchedBroker(self._engine_channel, near)

    def keep(self, index: int, listener: socket.socket, *, is_carried: bool = False) -> None:
        """As `WorkerPool.keep_listener`."""
        self.keep_listener(engine_listener(index, is_carried=is_carried), listener)

    def close(self) -> None:
        """Ends it."""
        self._broker.close()
        for sock in (self._far, self._control, *self._listeners.values()):
            sock.close()


@dataclass(frozen=True, slots=True)
class UnitMake:
    """What all machines of a unit have in common.

    Attributes:
        addresses: of the members' unit ports.
        make_engine: makes an engine.
    """

    config: EngineConfig
    front: ServerConfig
    shape: EngineShape
    addresses: tuple[Address, ...]
    make_engine: Callable[[], VirtualEngine]
    draw: random.Random
    watcher: UnitWatcher

    @property
    def facts(self) -> Facts:
        configuration = {"setting replicas": str(self.front.replicas), "setting router": f'"{DRAWN}"'}
        capacity = self.front.replicas * (1 + len(self.addresses))
        return Facts(RELEASE, MODEL_DIGEST, "private", _measure_private(), configuration, capacity)

    @property
    def hardening(self) -> dict[str, str]:
        processes = ["front", "engine", *(f"engine-{number}" for number in range(1, self.front.replicas))]
        return {f"{each}.seccomp": "applied: on" for each in processes}


@dataclass(eq=False)
class NodeLife:
    """The processes of a node from their start to their end.

    Attributes:
        machine: which machine it is of; 0 is the leader.
        is_ready: it has stated something.
        workers: tasks of its requests.
    """

    make: UnitMake
    machine: int
    now: Callable[[], float]
    key: UnitKey = field(init=False)
    transports: list[UnitTransport] = field(init=False)
    engines: SealedUnit = field(init=False)
    leader: UnitLeader | None = None
    port: UnitPort | None = None
    carriers: LeaderCarriers | MemberCarriers | None = None
    is_ready: bool = False
    has_ended: bool = False
    workers: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.key = UnitKey()
        self.zygote = UnitZygote()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SocketEventLoop)
        self._loop = loop
        self._tasks: list[asyncio.Task[None]] = []
        make = self.make
        self.transports = [
            UnitTransport(
                make.make_engine,
                partial(self._keep_listener, index),
                partial(make.watcher.note_message, self, index),
                Supervision(look_every_s=LOOK_S, restarts=Restarts(max_restarts=NUM_RESTARTS), ping_after_s=PING_S),
                make.shape.start_s,
            )
            for index in range(make.front.replicas)
        ]
        self.engines = SealedUnit(
            [EngineClient(transport, make.config, clock=loop.clock) for transport in self.transports],
            self._make_router,
            ClusterConfig(),
            make.shape.block_size,
            avoids_slow=False,
            draw=make.draw,
            clock=loop.clock,
        )
        if self.machine:
            self.carriers = MemberCarriers(self.key.memory)

    @property
    def host(self) -> str:
        return host_of(self.machine)

    def start(self) -> None:
        """Begins."""
        context = copy_context()
        context.run(HOST.set, self.host)
        self._tasks.append(self._loop.create_task(self._live(), context=context))

    def kill(self) -> None:
        """Ends all processes at once, as SIGKILL does; its connections with other machines are the network's."""
        if self.has_ended:
            return
        self.has_ended = True
        for worker in self.workers:
            worker.cancel()
        for task in self._tasks:
            task.cancel()
        for client in self.engines._replicas:
            client.detach()
            if client._lifecycle is not None:
                client._lifecycle.cancel()
        for transport in self.transports:
            transport.kill()
        if self.carriers is not None:
            self.carriers.close()
        self.zygote.close()
        self.key.close()

    async def _live(self) -> None:
        try:
            await self._open()
        except CloisterError:
            self.make.watcher.note_failure(self)

    async def _open(self) -> None:
        make = self.make
        await self.engines.start()
        unsealer = LocalUnsealer(Receiver(KeyRing(self._loop.time()), ReplayCache(NODE_KEY_LIFE_S)), self._loop.time)
        hardening = make.hardening
        announcer = Announcer(unsealer, SoftwareAttester(), make.facts, self.now(), lambda: hardening, now=self.now)
        await announcer.rehearse()
        verifier = announcer.make_verifier(gpu=False)
        side: UnitSide
        if self.machine:
            assert isinstance(self.carriers, MemberCarriers)
            carriers = self.carriers
            side = self.port = UnitPort(
                self.key,
                verifier,
                make.front.replicas,
                carry=carriers.carry,
                on_leader=carriers.set_leader,
                on_leader_lost=carriers.remove_leader,
                now=self.now,
            )
            self._begin(self.port.run(self._loop.network.listen((self.host, UNIT_PORT))))
        else:
            own = self.carriers = LeaderCarriers(self.key.memory, partial(self.zygote.keep, is_carried=True))
            side = self.leader = UnitLeader(
                self.key,
                make.addresses,
                verifier,
                make.front.replicas,
                longest_request_s=make.config.request_timeout_s + LIFE_MARGIN_S,
                on_pair=own.add,
                on_lost=own.remove,
                now=self.now,
            )
            await self.leader.start(self._loop.time() + START_TIMEOUT_S)
            self._begin(self.leader.run())
        announcer.join(_Stating(side, self._note_statement))
        self._begin(announcer.renew_forever())

    def _begin(self, work: object) -> None:
        self._tasks.append(self._loop.create_task(work))  # type: ignore[arg-type]

    def _note_statement(self, statement: Statement) -> None:
        self.is_ready = True
        if not self.machine:
            self.make.watcher.note_statement(self, statement)

    def _keep_listener(self, index: int, listener: socket.socket) -> None:
        if isinstance(self.carriers, MemberCarriers):
            self.carriers.keep_listener(index, listener.dup())
        self.zygote.keep(index, listener)

    def _make_router(self, model: ModelInfo) -> Router:
        context = RouterContext(PrefixKeys(model.fingerprint, self.make.shape.block_size), self.make.draw)
        return ROUTERS.get(DRAWN)(context)


class UnitWorker:
    """The worker of one request on the leader: its client of the engines, and the socket over which it gets channels.

    Args:
        note_ask: called with each engine to which it wants a channel.
    """

    def __init__(self, life: NodeLife, draw: random.Random, note_ask: Callable[[int], None]) -> None:
        make = life.make
        self._note_ask = note_ask
        ready = life.transports[0].ready
        assert ready is not None, "the engines have started"
        self._source = ChannelSource(life.zygote.broker.admit())
        self._transports = []
        for index in range(make.front.replicas * (1 + len(make.addresses))):
            transport = SealedWorkerTransport(msgspec.structs.replace(ready, kv_endpoint=None), index, make.front.replicas)
            transport.attach(partial(self._open, index))
            self._transports.append(transport)
        clock = asyncio.get_running_loop().clock  # type: ignore[attr-defined]
        self.client: RequestClient = connect_engines(self._transports, make.config, make.front, draw=draw, clock=clock)

    async def _open(self, index: int) -> socket.socket:
        self._note_ask(index)
        return await self._source.open(index)

    def exit(self) -> None:
        """Ends at once, as a process that exits."""
        clients = [self.client] if isinstance(self.client, EngineClient) else self.client._replicas  # type: ignore[attr-defined]
        for client in clients:
            client.detach()
            if client._lifecycle is not None:
                client._lifecycle.cancel()
        for transport in self._transports:
            if transport._messages is not None:
                transport._messages.close()
                transport._messages._writer.transport.abort()
        self._source._sock.close()


@cache
def _measure_private() -> str:
    return measure_profile("private")


def host_of(machine: int) -> str:
    """Returns the address of a machine."""
    return f"10.0.0.{machine + 1}"


def make_settings(num_engines: int, num_members: int, config: EngineConfig) -> tuple[EngineConfig, ServerConfig]:
    """Returns the settings of all machines of a unit."""
    members = ",".join(f"{host_of(machine)}:{UNIT_PORT}" for machine in range(1, num_members + 1))
    return replace(config, profile="private"), ServerConfig(replicas=num_engines, unit_members=members)
