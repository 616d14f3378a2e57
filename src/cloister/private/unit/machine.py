"""This node's role in a sealed unit of several machines: its key, its side of the pairings, and its carriers."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from cloister.engine import RequestClient
from cloister.engine.kv_unit import KVUnit
from cloister.private.unit.carriers import LeaderCarriers, MemberCarriers
from cloister.private.unit.membership import UnitLeader, UnitPort, UnitSide, listen_for_leader
from cloister.private.unit.pairing import UnitKey
from cloister.private.unit.peer_verification import PeerVerifier
from cloister.types.config import ServerConfig, parse_unit_members
from cloister.types.logs import describe

START_TIMEOUT_S: Final = 600.0
"""How long a leader waits for the evidence of its members, which may be loading their models."""
BROKEN: Final = "the part of this node that keeps its unit together has failed; start the node again"

_logger = logging.getLogger(__name__)

KeepListener = Callable[[int, socket.socket], None]
"""Takes ownership of the listener of an engine, by the engine's number."""


class UnitMachine(ABC):
    """A machine of a unit. `open_machine` creates it before the node's engines start.

    Attributes:
        fault: why the node must stop; None if there is no fault.
        takes_requests: whether clients seal to this node.
    """

    fault: str | None = None
    takes_requests = True

    def __init__(self, key: UnitKey, front: ServerConfig) -> None:
        self._key, self._front = key, front
        self._work: asyncio.Task[None] | None = None

    @abstractmethod
    def keep_listener(self, index: int, listener: socket.socket) -> None:
        """Called with each listener of an engine of this machine; the caller keeps ownership."""

    @abstractmethod
    async def join(self, verifier: PeerVerifier, keep_carrier: KeepListener, kv_unit: KVUnit | None) -> UnitSide:
        """Starts pairing with the other machines; returns the source of the unit's entries in the node's statements.

        Args:
            keep_carrier: takes ownership of listeners that forward to engines of other machines.
            kv_unit: the engines of this machine, if engines exchange KV.

        Raises:
            UnitRefusedError: the evidence of a member is refused, or does not arrive in time.
        """

    @abstractmethod
    def leave(self) -> None:
        """Called when the node shuts down, before its engines stop, so that other machines' requests move elsewhere."""

    def close(self) -> None:
        """Ends all connections with other machines, and wipes the keys."""
        if self._work is not None:
            self._work.cancel()
        self._key.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = asyncio.create_task(work, name="unit")
        self._work.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.critical("the unit is not kept together any more: %s", describe(error))
            self.fault = BROKEN


class LeaderMachine(UnitMachine):
    """The node that clients seal to."""

    def __init__(self, key: UnitKey, front: ServerConfig, longest_request_s: float) -> None:
        super().__init__(key, front)
        self._longest_request_s = longest_request_s
        self._carriers: LeaderCarriers | None = None

    def keep_listener(self, index: int, listener: socket.socket) -> None:
        """Does nothing: only this node's own workers connect to its engines' listeners."""

    async def join(self, verifier: PeerVerifier, keep_carrier: KeepListener, kv_unit: KVUnit | None) -> UnitSide:
        carriers = self._carriers = LeaderCarriers(self._key.memory, keep_carrier, kv_unit)
        members = parse_unit_members(self._front.unit_members)
        leader = UnitLeader(
            self._key,
            members,
            verifier,
            self._front.replicas,
            longest_request_s=self._longest_request_s,
            on_pair=carriers.add,
            on_lost=carriers.remove,
        )
        await leader.start(asyncio.get_running_loop().time() + START_TIMEOUT_S)
        self._begin(leader.run())
        return leader

    def leave(self) -> None:
        """Does nothing: members run no requests here."""

    def close(self) -> None:
        if self._carriers is not None:
            self._carriers.close()
        super().close()


class MemberMachine(UnitMachine):
    """A node whose engines are used by its leader's workers.

    Raises:
        ConfigError: the unit port cannot be used.
    """

    takes_requests = False

    def __init__(self, key: UnitKey, front: ServerConfig) -> None:
        super().__init__(key, front)
        assert front.unit_port is not None
        self._listener = listen_for_leader(front.host, front.unit_port)
        self._carriers = MemberCarriers(key.memory)

    def keep_listener(self, index: int, listener: socket.socket) -> None:
        self._carriers.keep_listener(index, listener.dup())

    async def join(self, verifier: PeerVerifier, keep_carrier: KeepListener, kv_unit: KVUnit | None) -> UnitSide:
        carriers = self._carriers
        carriers.kv_unit = kv_unit
        port = UnitPort(
            self._key,
            verifier,
            self._front.replicas,
            carry=carriers.carry,
            on_leader=carriers.set_leader,
            on_leader_lost=carriers.remove_leader,
        )
        self._begin(port.run(self._listener))
        return port

    def leave(self) -> None:
        if self._work is not None:
            self._work.cancel()  # the leader, and its workers with requests here, notice at once
        self._carriers.close()

    def close(self) -> None:
        self.leave()
        self._listener.close()
        super().close()


@dataclass(frozen=True)
class DrainedMachine:
    """The engines of a unit's machine. To drain them, it first leaves the unit."""

    machine: UnitMachine
    engine: RequestClient

    async def drain(self, timeout_s: float) -> None:
        """See `RequestClient.drain`."""
        self.machine.leave()
        await self.engine.drain(timeout_s)


def open_machine(front: ServerConfig, longest_request_s: float) -> UnitMachine | None:
    """Returns this node's role in its unit; None if it does not belong to one.

    Args:
        longest_request_s: maximum lifetime of a request's worker.

    Raises:
        ConfigError: memory cannot be locked, or the unit port cannot be used.
    """
    if front.unit_members is not None:
        return LeaderMachine(UnitKey("unit_members"), front, longest_request_s)
    if front.unit_port is not None:
        return MemberMachine(UnitKey("unit_port"), front)
    return None
