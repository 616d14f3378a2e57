"""Adds and removes replicas of a set, as the controller says (`cluster.scaling`): starts engines, and empties and ends them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Final

from cloister.cluster.action_log import ActionLog
from cloister.cluster.hand_offs import HandOffs
from cloister.cluster.replica_adapters import ReplicaAdapters
from cloister.cluster.replica_drains import DRAIN_EVERY_S, ReplicaDrains
from cloister.cluster.replica_states import ReplicaStates, ScalingConfig
from cloister.cluster.request_moves import RequestMoves
from cloister.cluster.routers.base import draw_by_capacity
from cloister.cluster.scaling import GONE, ReplicaAddition, ReplicaRemoval, ScalingController, choose_first
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.engine.request_client import DRAIN_REPLICA_S
from cloister.types.errors import InvalidRequestError

START_TIMEOUT_S: Final = 600.0
"""Longest wait for the engine of a replica that is added."""
SETTLE_S: Final = 0.05

_logger = logging.getLogger(__name__)


class ReplicaScaling:
    """Scales a replica set.

    Args:
        draw: chooses among replicas that qualify.
        begin: begins a task of this name, which ends with the replica set.
        is_paused: whether an update is under way: nothing is added or removed meanwhile.
    """

    def __init__(
        self,
        states: ReplicaStates,
        drains: ReplicaDrains,
        moves: RequestMoves,
        hand_offs: HandOffs,
        adapters: ReplicaAdapters,
        actions: ActionLog,
        config: ScalingConfig,
        draw: random.Random,
        begin: Callable[[Coroutine[None, None, None], str], None],
        is_paused: Callable[[], bool],
    ) -> None:
        self._states, self._drains, self._moves, self._hand_offs = states, drains, moves, hand_offs
        self._adapters, self._actions, self._draw = adapters, actions, draw
        self._begin, self._is_paused = begin, is_paused
        self._look_every_s = config.look_every_s
        self._controller = ScalingController(
            draw, config.num_min, up_after_s=config.up_after_s, down_after_s=config.down_after_s
        )
        num_places = len(states.clients) - len(states.standby)
        states.stopped = set(range(num_places)) - choose_first(states.roles[:num_places], config.num_min)

    async def run(self) -> None:
        """Asks the controller regularly, until it is cancelled."""
        while True:
            await asyncio.sleep(self._look_every_s)
            if not self._must_wait():
                self._look(asyncio.get_running_loop().time())

    def _must_wait(self) -> bool:
        """Whether an update is under way, or adapters change."""
        return self._is_paused() or self._adapters.are_changing

    async def settle(self) -> None:
        """Waits until nothing is being added or removed: removals end early while an update is under way or adapters change."""
        ends_s = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while (self._states.adding or self._states.removing) and asyncio.get_running_loop().time() < ends_s:
            await asyncio.sleep(SETTLE_S)

    def _look(self, now: float) -> None:
        match self._controller.decide([replica.without_held() for replica in self._states.snapshots()], now):
            case ReplicaAddition(index):
                self._begin(self._add(index), "addition of a replica")
            case ReplicaRemoval(index):
                self._begin(self._remove(index), "removal of a replica")
            case _:
                pass

    async def _add(self, index: int) -> None:
        await self.add(index)

    async def add(self, index: int) -> bool:
        """Starts the engine of a replica that is stopped, or takes one back that is being removed. Returns whether it runs."""
        states = self._states
        if index in states.removing:
            states.removing.discard(index)
            _logger.info("replica %d stays, because the others are busy", index)
            return True
        client, adapters = states.clients[index], list(self._adapters.loaded.values())
        begun_s = asyncio.get_running_loop().time()
        self._actions.note_addition(index)
        client.adapters.expect(adapters)
        states.stopped.discard(index)
        states.adding.add(index)
        try:
            is_there = await client.wake(START_TIMEOUT_S)
        finally:
            states.adding.discard(index)
        if is_there:
            _logger.info("replica %d runs after %.2f s", index, asyncio.get_running_loop().time() - begun_s)
            self._share(index)
        return is_there

    async def stand_in(self, index: int) -> None:
        """Adds a replica before one is drained, if no other one would get its requests."""
        snapshots = [each for each in self._states.snapshots() if each.index != index and not each.is_standby]
        stopped = [each for each in snapshots if each.is_stopped and each.state not in GONE]
        if stopped and all(each.is_stopped or each.state in GONE for each in snapshots):
            if self._adapters.are_changing:
                raise InvalidRequestError("an adapter is being loaded or unloaded; drain when that has ended", param="replica")
            if not await self.add(draw_by_capacity(stopped, self._draw).index):
                raise InvalidRequestError("no other replica could be started; the log says why", param="replica")

    async def _remove(self, index: int) -> None:
        states, client = self._states, self._states.clients[index]
        states.removing.add(index)
        self._actions.note_removal(index)
        try:
            if await self._empty(index) and await client.rest() and index in states.removing:
                states.stopped.add(index)
        finally:
            states.removing.discard(index)
        if index not in states.stopped:
            await client.wake(START_TIMEOUT_S)  # it was wanted again while its engine ended

    async def _empty(self, index: int) -> bool:
        """Has the requests of a replica move or end. Returns False if it stays: some found no room, or it is needed."""
        states, loop = self._states, asyncio.get_running_loop()
        ends_s = loop.time() + DRAIN_REPLICA_S
        while index in states.removing and not self._must_wait():
            await self._drains.move_away(index)
            if not states.clients[index].num_requests:
                return index in states.removing
            if loop.time() >= ends_s:
                return False
            await asyncio.sleep(DRAIN_EVERY_S)
        return False

    def _share(self, index: int) -> None:
        """Gives a replica that was added its share of the requests that wait at others of its role."""
        pool = [r for r in self._states.snapshots() if r.role == self._states.roles[index] and _takes_part(r)]
        share = sum(replica.num_requests for replica in pool) // max(1, len(pool))
        waiting = [
            (request.request_id, replica.index)
            for replica in pool
            if replica.index != index
            for request in self._states.clients[replica.index].request_snapshots()
            if not (request.has_slot or request.num_output_tokens)
        ]
        for request_id, source in waiting[::-1][:share]:  # those that came last, and would wait longest
            hands_off = self._hand_offs.has(request_id, source)
            if self._moves.move_waiting(request_id, index) and hands_off:
                self._hand_offs.add(request_id, index)


def _takes_part(replica: ReplicaSnapshot) -> bool:
    return not (replica.is_stopped or replica.is_standby or replica.state in GONE)
