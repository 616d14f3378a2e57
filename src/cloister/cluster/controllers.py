"""Runs the controllers of a replica set periodically, and performs their decisions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Final

from cloister.cluster.action_log import ActionLog
from cloister.cluster.migration import LoadBalancer, Move
from cloister.cluster.replica_drains import ReplicaDrains
from cloister.cluster.replica_states import ReplicaStates
from cloister.cluster.request_moves import RequestMoves
from cloister.cluster.roles import RoleFlipper
from cloister.cluster.standby import StandbyKeeper
from cloister.types.errors import InvalidRequestError

REBALANCE_EVERY_S: Final = 0.5
STANDBY_EVERY_S: Final = 0.5

Begin = Callable[[Coroutine[None, None, None], str], None]
"""Begins a task of this name, which ends with the replica set."""

_logger = logging.getLogger(__name__)


class StandbyPlaces:
    """Promotes standby replicas (`cluster.standby`).

    Args:
        draw: chooses among standby replicas.
    """

    def __init__(self, states: ReplicaStates, draw: random.Random) -> None:
        self._states, self._keeper = states, StandbyKeeper(draw)

    async def run(self) -> None:
        """Promotes periodically, for replicas lost while no standby was ready; runs until it is cancelled."""
        while True:
            await asyncio.sleep(STANDBY_EVERY_S)
            self.promote()

    def promote(self) -> None:
        """Replaces lost replicas by ready standby ones."""
        states = self._states
        if not states.standby:
            return
        given_up = states.draining | states.inactive
        for promotion in self._keeper.decide([each for each in states.snapshots() if each.index not in given_up]):
            states.promote(promotion.index, promotion.lost)
            _logger.warning(
                "replica %d takes the place of replica %d, which stands by when it runs again", promotion.index, promotion.lost
            )

    def stand_in(self, index: int) -> None:
        """Replaces a draining replica by a ready standby one, if no other replica accepts requests."""
        states = self._states
        if index in states.standby or any(snapshot.is_accepting for snapshot in states.snapshots()):
            return
        if (ready := self._keeper.choose(states.snapshots())) is not None:
            states.promote(ready, index)


class LoadLevelling:
    """Moves running requests and flips roles, as the load changes (`cluster.migration`, `cluster.roles`).

    Args:
        is_paused: whether something else is moving requests.
    """

    def __init__(
        self,
        states: ReplicaStates,
        moves: RequestMoves,
        drains: ReplicaDrains,
        actions: ActionLog,
        draw: random.Random,
        begin: Begin,
        is_paused: Callable[[], bool],
    ) -> None:
        self._states, self._moves, self._drains, self._actions = states, moves, drains, actions
        self._balancer, self._flips = LoadBalancer(draw), RoleFlipper(draw)
        self._begin, self._is_paused = begin, is_paused

    async def run(self) -> None:
        """Runs the controllers periodically, until it is cancelled."""
        while True:
            await asyncio.sleep(REBALANCE_EVERY_S)
            if not self._is_paused():
                self._look(asyncio.get_running_loop().time())

    def _look(self, now: float) -> None:
        replicas = [replica.without_held() for replica in self._states.snapshots()]
        requests = {
            index: [request for request in client.request_snapshots() if request.request_id in self._moves.places]
            for index, client in enumerate(self._states.clients)
        }
        for move in self._balancer.decide([replica for replica in replicas if replica.is_accepting], requests, now):
            self._begin(self._move(move), "migration")
        self._actions.log_moves()
        if (flip := self._flips.decide(replicas, now)) is not None:
            self._begin(_perform(self._drains.set_role(flip.index, flip.role)), "flip")

    async def _move(self, move: Move) -> None:
        if await self._moves.migrate(move.request_id, move.target):
            self._actions.note_move(move)


async def _perform(action: Coroutine[None, None, object]) -> None:
    with contextlib.suppress(InvalidRequestError):  # an operator drains the others meanwhile
        await action
