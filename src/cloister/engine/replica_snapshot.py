"""The load of a replica and the progress of a request, for routers, other controllers and metrics. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

Role = Literal["mixed", "prefill", "decode"]
"""What a replica computes: whole requests, their prompts only, or their answers after the first token."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)
StepCoefficients = tuple[float, float, float, float]
"""Seconds (per step, per token, per key attended, per key read) of `scheduler.StepCost`; all zero while unknown."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """The load of one replica at a moment.

    Attributes:
        index: its place among the replicas, from 0.
        is_accepting: it runs or is idle, its queue has room, and it is not drained.
        is_idle: no engine runs, and a request starts one.
        num_requests: requests that it has, waiting ones included.
        num_waiting: requests without a slot yet.
        num_queued: sequences without a slot after its last step, those that came from other replicas included.
        num_pending_tokens: prompt tokens of requests without a first token.
        num_used_blocks, num_total_blocks: KV blocks after its last step; 0 before the first one.
        num_routed: requests that it was given so far.
        num_migrated: requests among those that were moved to it while they ran.
        capacity: its speed relative to the others.
        role: what it computes.
        cost: the times of its steps.
        transfer_token_s: seconds that KV of a token takes to come to it from another replica; 0 before the first transfer.
        slowness: its steps take so many times as long as those of the others (`cluster.health`); 1 while unknown.
        is_slow: it gets no requests because of that.
        num_mismatches: how often it computed other tokens than another replica (`cluster.replay`).
    """

    index: int
    is_accepting: bool = True
    is_idle: bool = False
    num_requests: int = 0
    num_waiting: int = 0
    num_queued: int = 0
    num_pending_tokens: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    num_routed: int = 0
    num_migrated: int = 0
    capacity: float = 1.0
    role: Role = "mixed"
    cost: StepCoefficients = (0.0, 0.0, 0.0, 0.0)
    transfer_token_s: float = 0.0
    slowness: float = 1.0
    is_slow: bool = False
    num_mismatches: int = 0

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Returns the predicted time of a prompt of `num_tokens`, of which `num_cached` are cached."""
        num_new = num_tokens - num_cached
        per_step, per_token, per_attended, _ = self.cost
        return per_step + per_token * num_new + per_attended * num_new * (num_cached + num_new / 2)

    @property
    def can_prefill(self) -> bool:
        """Whether it computes prompts."""
        return self.role != "decode"

    @property
    def can_decode(self) -> bool:
        """Whether it computes answers."""
        return self.role != "prefill"


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """The progress of a request that runs or waits.

    Attributes:
        num_output_tokens: of all its open sequences.
        num_sequences: those that have not ended.
        priority: lower is more urgent.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_sequences: int = 1
    priority: int = 0
