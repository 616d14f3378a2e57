"""The engines of a sealed node, which are one trust unit: one statement attests all of them, and clients seal to one key.

The front starts and watches them, and sees no request. The worker of a request draws an engine by capacity, gets a channel to
it, and continues on another one if that dies. A worker knows only its own request, so others cannot influence the choice.

Where a unit has several machines, an attacker in the network, or an operator of a member, can have any connection fail. So a
request that has lost an engine elsewhere continues only on the leader's own machine: so failing connections bring no other
machine more requests. A request that has lost an engine of the leader's machine also continues there, as long as another one
runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from cloister.cluster.replica_set import ReplicaSet
from cloister.cluster.replica_states import ClusterConfig
from cloister.cluster.request_routing import MakeRouter
from cloister.cluster.roles import RoutingDecision, assign_roles
from cloister.cluster.routers import ROUTERS, Router
from cloister.cluster.routers.base import RouterContext
from cloister.engine import EngineClient, RequestClient, SealedWorkerTransport
from cloister.engine.in_flight import InFlightRequest
from cloister.engine.kv_unit import KVUnit
from cloister.kv import PrefixKeys
from cloister.types.clock import Clock
from cloister.types.config import EngineConfig, ServerConfig, parse_unit_members
from cloister.types.request import ModelInfo

DRAWN: Final = "capacity_random"


class SealedUnit(ReplicaSet):
    """The engines as the front sees them: it replaces those that die. What it calls a request is only an id.

    Attributes:
        kv_unit: introduces them to each other, and ends with them; None if they exchange no KV.
    """

    kv_unit: KVUnit | None = None

    async def drain(self, timeout_s: float) -> None:
        try:
            await super().drain(timeout_s)
        finally:
            if self.kv_unit is not None:
                self.kv_unit.close()

    def fault(self) -> str | None:
        """Returns why an engine will not be started again: a node with fewer engines than it states must end."""
        return next((fault for replica in self._replicas if (fault := replica.fault()) is not None), None)


class WorkerUnit(ReplicaSet):
    """The engines as the worker of one request draws among them.

    Args:
        num_own: engines of the leader's own machine, which come first.
    """

    def __init__(
        self,
        replicas: Sequence[EngineClient],
        make_router: MakeRouter,
        roles: ClusterConfig,
        block_size: int,
        num_own: int,
        clock: Clock | None = None,
    ) -> None:
        self._num_own = num_own
        super().__init__(replicas, make_router, roles, block_size, avoids_slow=False, clock=clock)

    def _connect(self, index: int, replica: EngineClient) -> None:
        super()._connect(index, replica)
        if index >= self._num_own:
            replica.after_failure = self._stay_home

    def _stay_home(self) -> None:
        """An engine elsewhere has failed: this worker uses none of another machine any more, and asks for no channel there."""
        elsewhere = range(self._num_own, len(self._replicas))
        self._states.given_up.update(elsewhere)
        for index in elsewhere:
            self._replicas[index].give_up()

    def _find_next(self, lost: int, found: InFlightRequest) -> RoutingDecision | None:
        able = [replica for replica in self._states.candidates(found) if replica.can_decode or not found.has_output]
        at_home = [replica for replica in able if replica.index < self._num_own]
        if (placement := self._routing.find_place(found, among=at_home)) is not None:
            return placement
        if lost < self._num_own:
            return super()._find_next(lost, found)
        # it waits for an engine of this machine, for as long as it has time
        return self._routing.find_place(found, among=[self._states.snapshot(index) for index in range(self._num_own)])


def count_engines(front: ServerConfig) -> int:
    """Returns how many engines a unit has, on all of its machines."""
    return front.replicas * (1 + len(parse_unit_members(front.unit_members)))


def connect_engines(
    transports: Sequence[SealedWorkerTransport],
    config: EngineConfig,
    front: ServerConfig,
    *,
    draw: random.Random | None = None,
    clock: Clock | None = None,
) -> RequestClient:
    """Returns a worker's client of the engines behind these transports, which know what the engines say of themselves.

    Args:
        draw: draws engines, and when a request is tried that may have killed one; None: the system's random numbers.
    """
    clients = [EngineClient(transport, config, clock=clock, draw=draw) for transport in transports]
    if len(clients) == 1:
        return clients[0]

    make = ROUTERS.get(DRAWN)

    def make_router(model: ModelInfo) -> Router:
        return make(RouterContext(PrefixKeys(model.fingerprint, config.block_size), draw or random.SystemRandom()))

    num_machines = len(clients) // front.replicas
    roles = tuple(assign_roles(front.replicas, front.prefill, front.decode)) * num_machines
    unit = WorkerUnit(clients, make_router, ClusterConfig(roles), config.block_size, front.replicas, clock)
    unit.model, unit.memory, unit.startup = clients[0].model, clients[0].memory, clients[0].startup  # needed before the start
    return unit
