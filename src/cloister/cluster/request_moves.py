"""Moves requests from one replica to another while they run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from cloister.cluster.replica_states import ReplicaStates
from cloister.cluster.shadow_moves import ShadowEnd, ShadowMoves
from cloister.engine.in_flight import InFlightRequest
from cloister.types.events import KVLoaded

WAKE_TIMEOUT_S: Final = 10.0
"""Longest wait of a move for an idle engine to start; the request then stays where it is."""
COPY_TIMEOUT_S: Final = 5.0
"""Longest wait for KV; what did not arrive is computed."""
MAX_SHADOWS: Final = 16
"""How often a target restarts with all tokens so far to catch up, before the source is stopped."""


class RequestMoves:
    """The moves of a replica set.

    Args:
        block_size: tokens of a KV block.
        on_move: called with (request id, source, target) when a request goes over.

    Attributes:
        places: request id -> index of its replica, for all that have not ended.
        shadows: the requests that two engines compute.
    """

    def __init__(self, states: ReplicaStates, block_size: int, on_move: Callable[[str, int, int], None]) -> None:
        self.places: dict[str, int] = {}
        self.shadows = ShadowMoves(states.clients, block_size, states.is_accepting, self._note_move)
        self._states, self._clients, self._block_size, self._on_move = states, states.clients, block_size, on_move
        self._moving: set[str] = set()
        self._step_waiters: list[list[asyncio.Future[None]]] = [[] for _ in states.clients]
        self._loads: dict[tuple[int, str], asyncio.Future[KVLoaded]] = {}

    async def migrate(self, request_id: str, target: int) -> bool:
        """Moves a request to another replica while it runs. Its client sees one answer without a gap.

        If engines can load KV from each other, the target first loads the KV so far. Then it computes the request beside the
        source, which is stopped once the target has as many tokens. A target that stays behind restarts when the source has
        just filled a block, which it can load: then it has least to compute. An idle target is started first. Returns False if
        the request has ended, has moved or is being moved, or if the target does not accept it or has other weights than those
        with which the answer has begun.
        """
        source = self.places.get(request_id)
        if source is None or source == target or request_id in self._moving or not self._states.is_accepting(target):
            return False
        self._moving.add(request_id)
        try:
            return await self._move(request_id, source, target)
        finally:
            self._moving.discard(request_id)

    async def _move(self, request_id: str, source: int, target: int) -> bool:
        if not await self._clients[target].wake(WAKE_TIMEOUT_S):
            return False
        has_copied = False
        for attempt in range(MAX_SHADOWS):
            if self._clients[source].fingerprint != self._clients[target].fingerprint:
                break  # there is no KV to load, and nothing that both would say
            has_copied = await self._copy_kv(request_id, source, target)
            if self._clients[source].find(request_id) is not None:
                await self._wait_for_step(source)  # its next token comes as late as can be
            end = await self.shadows.run(request_id, source, target)
            if end is ShadowEnd.TOOK_OVER:
                return True
            if end is ShadowEnd.FAILED or (end is ShadowEnd.FAR and attempt and not has_copied):
                break  # it computes what it could not load, once
            if has_copied and not await self._wait_for_block(request_id, source):
                break
        if self.places.get(request_id) != source or not self._states.is_accepting(target):
            return False
        return self.move_now(request_id, source, target, loads_kv=not has_copied)

    def move_now(self, request_id: str, source: int, target: int, *, loads_kv: bool = True) -> bool:
        """Moves a request at once; returns False if it has ended, or the target has other weights than its answer."""
        self.shadows.stop(request_id)
        waiting = self._clients[source].find(request_id)
        if waiting is not None and waiting.is_begun and waiting.stats.fingerprint != self._clients[target].fingerprint:
            return False
        found = self._clients[source].detach_request(request_id)
        if found is None:
            return False
        self._note_move(request_id, source, target)
        endpoint = self._clients[source].kv_endpoint if found.has_output and loads_kv else None
        self._clients[target].adopt(found, endpoint)
        return True

    def move_waiting(self, request_id: str, target: int) -> bool:
        """Moves a request that waits for its first step; returns False if it has ended, is being moved or does not fit."""
        source = self.places.get(request_id)
        if source is None or source == target or request_id in self._moving or request_id in self.shadows:
            return False
        return self._states.is_accepting(target) and self.move_now(request_id, source, target)

    def note_step(self, index: int) -> None:
        """Called when a replica has made a step."""
        waiters, self._step_waiters[index] = self._step_waiters[index], []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def note_load(self, index: int, event: KVLoaded) -> None:
        """Called when KV has come to a replica."""
        if (waiting := self._loads.get((index, event.request_id))) is not None and not waiting.done():
            waiting.set_result(event)

    def _note_move(self, request_id: str, source: int, target: int) -> None:
        self.places[request_id] = target
        self._states.num_migrated[target] += 1
        self._on_move(request_id, source, target)

    async def _copy_kv(self, request_id: str, source: int, target: int) -> bool:
        """Has the target load the KV of a running request. Returns whether it did."""
        endpoint = self._clients[source].kv_endpoint
        found = self._clients[source].find(request_id)
        if endpoint is None or self._clients[target].kv_endpoint is None or found is None or not found.has_output:
            return False
        self._clients[source].hold(request_id)
        loaded: asyncio.Future[KVLoaded] = asyncio.get_running_loop().create_future()
        self._loads[target, request_id] = loaded
        self._clients[target].prefetch(found, endpoint)
        try:
            async with asyncio.timeout(COPY_TIMEOUT_S):
                return (await loaded).complete
        except TimeoutError:
            return False
        finally:
            self._loads.pop((target, request_id), None)

    async def _wait_for_block(self, request_id: str, source: int) -> bool:
        """Waits until a running request has just filled a KV block. Returns False if it has ended, or takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COPY_TIMEOUT_S):
                while (found := self._clients[source].find(request_id)) is not None and found.has_output:
                    if self._num_past_block(found) <= 1:
                        return True
                    await self._wait_for_step(source)
        return False

    async def _wait_for_step(self, index: int) -> None:
        """Waits until a replica has made a step, for a time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._step_waiters[index].append(waiter)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COPY_TIMEOUT_S):
                await waiter

    def _num_past_block(self, found: InFlightRequest) -> int:
        """Returns how many tokens with KV a request has behind its last full block; its last token has none yet."""
        return (len(found.request.token_ids) + len(found.token_ids[0]) - 1) % self._block_size
