"""Chooses which requests leave a replica to free KV blocks there, and where each goes. Pure: no clock, no I/O; randomness is
given."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from cloister.cluster.routers.base import draw_by_capacity
from cloister.engine.replica_snapshot import ReplicaSnapshot, RequestSnapshot

MAX_LEAVING: Final = 4
"""Requests that leave one replica at once."""
GROWTH: Final = 1.125
"""Required free blocks at the target, relative to those that the request holds: with fewer, others would soon be preempted."""


class KVRoom:
    """The free KV blocks of some replicas, reserved by planned moves.

    The blocks of a request are estimated from its tokens and the average number of blocks per token. With shared prefixes the
    estimate may be wrong; then a move frees fewer blocks.

    Args:
        replicas: those that accept requests and have made a step.
        requests: by replica.
        draw: chooses among the replicas that have room for a request.
    """

    def __init__(
        self, replicas: Sequence[ReplicaSnapshot], requests: Mapping[int, Sequence[RequestSnapshot]], draw: random.Random
    ) -> None:
        self._replicas = {replica.index: replica for replica in replicas if replica.num_total_blocks}
        self._draw = draw
        running = [r for index in self._replicas for r in requests.get(index, ()) if r.has_slot]
        num_used = sum(replica.num_used_blocks for replica in self._replicas.values())
        self._blocks_per_token = num_used / max(1, sum(map(_count_tokens, running)))
        self._free = {i: max(0, r.num_total_blocks - r.num_used_blocks) for i, r in self._replicas.items()}
        self._coming = dict.fromkeys(self._replicas, 0)

    def count_held(self, request: RequestSnapshot) -> int:
        """Returns how many blocks a running request holds."""
        return math.ceil(_count_tokens(request) * self._blocks_per_token)

    def count_needed(self, request: RequestSnapshot) -> int:
        """Returns how many blocks a request needs at its target, with room to grow."""
        return math.ceil(GROWTH * self.count_held(request)) + request.num_sequences

    def count_free(self, index: int) -> int:
        """Returns how many blocks of a replica are free; none of one that has made no step yet."""
        return self._free.get(index, 0)

    def take(self, request: RequestSnapshot, targets: Collection[int]) -> int | None:
        """Draws one of `targets` that has a slot and blocks for a request, by capacity, and gives it the blocks. None if none
        has them."""
        able = [self._replicas[i] for i in sorted(targets) if self._has_room(i, request)]
        if not able:
            return None
        index = draw_by_capacity(able, self._draw).index
        self._free[index] -= self.count_needed(request)
        self._coming[index] += request.num_sequences
        return index

    def clear(
        self, index: int, num_blocks: int, leaving: Sequence[RequestSnapshot], targets: Collection[int]
    ) -> list[tuple[RequestSnapshot, int]] | None:
        """Chooses requests that leave a replica until `num_blocks` are free there: least urgent ones first, of equal ones as
        few as will do. Returns each with where it goes; None if there is no way with at most MAX_LEAVING.

        Args:
            leaving: those of its requests that may leave.
            targets: replicas to which they may go.
        """
        moves: list[tuple[RequestSnapshot, int]] = []
        left, num_missing = list(leaving), num_blocks - self.count_free(index)
        while num_missing > 0:
            able = [r for r in left if any(self._has_room(target, r) for target in targets)]
            if not able or len(moves) == MAX_LEAVING:
                return None
            least = max(r.priority for r in able)
            chosen = min(
                (r for r in able if r.priority == least),
                key=lambda r: (self.count_held(r) < num_missing, abs(self.count_held(r) - num_missing), r.request_id),
            )
            target = self.take(chosen, targets)
            assert target is not None
            moves.append((chosen, target))
            left.remove(chosen)
            num_missing -= self.count_held(chosen)
        return moves

    def _has_room(self, index: int, request: RequestSnapshot) -> bool:
        replica = self._replicas.get(index)
        if replica is None or replica.num_queued:
            return False
        num_running = replica.num_requests + self._coming[index]
        has_slot = not replica.num_slots or num_running + request.num_sequences <= replica.num_slots
        return has_slot and self._free[index] >= self.count_needed(request)


def _count_tokens(request: RequestSnapshot) -> int:
    return request.num_prompt_tokens + request.num_output_tokens
