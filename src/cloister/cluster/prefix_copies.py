"""Performs the decisions of `HotPrefixes`: leases of prefixes, and copies between replicas (decisions/0052)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from cloister.cluster.hot_prefixes import HotPrefixes, LeaseAction, LeaseOrder
from cloister.engine.client import EngineClient
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.clock import Clock
from cloister.types.events import KVLoaded, PrefixLeased
from cloister.types.request import Request
from cloister.types.scope import Scope

LOOK_EVERY_S: Final = 0.25


class PrefixCopies:
    """The leases and copies of hot prefixes of a replica set.

    Args:
        replicas: a client for each engine; the list may change.
        controller: says what is due.
        list_replicas: returns the replicas that serve the weights of new requests.
        note_copy: called when a replica has a copy of the prefix of a request.
    """

    def __init__(
        self,
        replicas: Sequence[EngineClient],
        controller: HotPrefixes,
        list_replicas: Callable[[], list[ReplicaSnapshot]],
        note_copy: Callable[[Request, int], None],
        clock: Clock,
    ) -> None:
        self._replicas, self._controller, self._clock = replicas, controller, clock
        self._list_replicas, self._note_copy = list_replicas, note_copy
        self.num_copies = [0 for _ in replicas]

    def __len__(self) -> int:
        """Prefixes that have leases."""
        return len(self._controller)

    def owns(self, event: KVLoaded) -> bool:
        """Whether a load is of a copy, and of no request."""
        return self._controller.owns(event.request_id)

    def note(self, request: Request, index: int) -> None:
        """Counts a request that a replica was given."""
        self._controller.note(request, index, self._clock.now())

    async def run(self) -> None:
        """Asks the controller regularly, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Does what is due."""
        self._perform(self._controller.decide([each.without_held() for each in self._list_replicas()], self._clock.now()))

    def take_reply(self, index: int, reply: PrefixLeased) -> None:
        """A replica has a lease, or has none (any more)."""
        prefix = self._controller.request_of(reply.name)
        self._perform(self._controller.note_leased(reply.name, index, reply.num_tokens, self._clock.now()))
        if reply.num_tokens and prefix is not None and self._controller.is_copy(reply.name, index):
            self.num_copies[index] += 1
            self._note_copy(prefix, index)
        if reply.num_tokens:
            self.look()  # the next one need not wait

    def lose(self, index: int) -> None:
        """The engine of a replica has ended."""
        self._perform(self._controller.lose(index))

    def forget(self, scope: Scope) -> None:
        """All that is cached of a scope is dropped."""
        self._perform(self._controller.forget(scope))

    def _perform(self, actions: Iterable[LeaseAction]) -> None:
        for action in actions:
            replica = self._replicas[action.index]
            if not isinstance(action, LeaseOrder):
                replica.renew_prefix(action.name, action.lease_s)
                continue
            source = None if action.source is None else self._replicas[action.source].kv_endpoint
            if action.source is not None and source is None:
                self._perform(self._controller.note_leased(action.request.request_id, action.index, 0, self._clock.now()))
            else:
                replica.lease_prefix(action.request, action.lease_s, source)
