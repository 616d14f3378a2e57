"""The load of a replica, for routers and metrics. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """The load of one replica at a moment.

    Attributes:
        index: its place among the replicas, from 0.
        is_accepting: it runs, and its queue has room.
        num_requests: requests that it has, waiting ones included.
        num_waiting: requests without a slot yet.
        num_pending_tokens: prompt tokens of requests without a first token.
        num_used_blocks, num_total_blocks: KV blocks after its last step; 0 before the first one.
        num_routed: requests that it was given so far.
        capacity: its speed relative to the others.
        slowness: its steps take so many times as long as those of the others (`cluster.health`); 1 while unknown.
        is_slow: it gets no requests because of that.
        num_mismatches: how often it computed other tokens than another replica (`cluster.replay`).
    """

    index: int
    is_accepting: bool = True
    num_requests: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    num_routed: int = 0
    capacity: float = 1.0
    slowness: float = 1.0
    is_slow: bool = False
    num_mismatches: int = 0
