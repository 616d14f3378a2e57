"""Drains replicas for operators, updates and role changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from cloister.cluster.action_log import ActionLog
from cloister.cluster.hand_offs import HandOffs
from cloister.cluster.replica_states import ReplicaStates
from cloister.cluster.request_moves import RequestMoves
from cloister.cluster.request_routing import RequestRouting
from cloister.cluster.standby import can_take_over
from cloister.engine.replica_snapshot import NOT_WELL, RequestSnapshot, Role
from cloister.engine.request_client import DRAIN_REPLICA_S
from cloister.types.errors import InvalidRequestError

DRAIN_EVERY_S: Final = 0.05


class ReplicaDrains:
    """The drains of a replica set.

    Args:
        actions: counts them.
        stand_in: called with the index of a replica that begins to drain.

    Attributes:
        add_first: called with the index of a replica before it is drained: scaling may have to start another one. None without
            scaling.
    """

    def __init__(
        self,
        states: ReplicaStates,
        routing: RequestRouting,
        moves: RequestMoves,
        hand_offs: HandOffs,
        actions: ActionLog,
        stand_in: Callable[[int], None],
    ) -> None:
        self._states, self._clients = states, states.clients
        self._routing, self._moves, self._hand_offs = routing, moves, hand_offs
        self._actions, self._stand_in = actions, stand_in
        self.add_first: Callable[[int], Awaitable[None]] | None = None

    async def drain(self, index: int, timeout_s: float = DRAIN_REPLICA_S, *, for_update: bool = False) -> int:
        """As `RequestClient.drain_replica`.

        Args:
            for_update: a step of a rolling update, which is counted itself.
        """
        self._check_index(index)
        draining = self._states.draining
        if self.add_first is not None and index not in draining:
            await self.add_first(index)
        if len(draining | self._states.stopped | {index}) == len(self._clients):
            raise InvalidRequestError("no other replica is left; return a drained one first", param="replica")
        if index not in draining and not for_update:
            self._actions.note_drain(index)
        draining.add(index)
        self._stand_in(index)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while index in draining:
            await self.move_away(index)
            if not self._clients[index].num_requests or asyncio.get_running_loop().time() >= deadline_s:
                break
            await asyncio.sleep(DRAIN_EVERY_S)
        return self._clients[index].num_requests

    def check(self, index: int) -> None:
        """As `RequestClient.check_drain`. An unhealthy replica may always be drained."""
        self._check_index(index)
        snapshots = self._states.snapshots()
        others = [snapshot for snapshot in snapshots if snapshot.index != index]
        is_last = len(self._states.draining | {index}) == len(self._clients)  # `drain` says so
        if not is_last and snapshots[index].state not in NOT_WELL and not any(map(can_take_over, others)):
            listed = ", ".join(
                f"replica {other.index} {'stands by and ' if other.is_standby else ''}is {other.state}" for other in others
            )
            raise InvalidRequestError(
                f"replica {index} is the last healthy one, so it cannot be drained: {listed}; return a drained one, or "
                "wait until another one runs (`cloister cluster status` shows it)",
                param="replica",
            )

    def give_back(self, index: int) -> None:
        """As `RequestClient.return_replica`."""
        self._check_index(index)
        self._states.draining.discard(index)

    async def set_role(self, index: int, role: Role, timeout_s: float = DRAIN_REPLICA_S) -> None:
        """As `ReplicaSet.set_role`."""
        await self.drain(index, timeout_s)
        self._states.roles[index] = role
        self._actions.note_flip(index, role)
        self.give_back(index)

    async def move_away(self, index: int) -> None:
        """Moves the requests of a replica to others, as far as these have room."""
        await asyncio.gather(*(self._move_one(request, index) for request in self._clients[index].request_snapshots()))

    async def _move_one(self, request: RequestSnapshot, index: int) -> None:
        found = self._clients[index].find(request.request_id)
        placement = None if found is None else self._routing.find_place(found, excluding=index)
        if placement is not None and await self._moves.migrate(request.request_id, placement.index) and placement.hands_off:
            self._hand_offs.add(request.request_id, placement.index)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self._clients):
            raise InvalidRequestError(
                f"there is no such replica; replicas are numbered 0 to {len(self._clients) - 1}", param="replica"
            )
