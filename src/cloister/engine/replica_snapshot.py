"""The load of a replica and the progress of a request, for routers, other controllers and metrics. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

Role = Literal["mixed", "prefill", "decode"]
"""What a replica computes: whole requests, their prompts only, or their answers after the first token."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)
ReplicaState = Literal[
    "lost", "starting", "draining", "drained", "stopping", "stopped",
    "stalled", "suspicious", "slow", "standby", "idle", "running",
]  # fmt: skip
"""The state of a replica. Of several that apply, it is the first one here:

- lost: its engine died too often and is not started again; starting: its engine is started, or started again;
- draining, drained: it gets no new requests, and still has some, or none;
- stopping, stopped: its engine ends, or has ended, because fewer replicas are enough (`cluster.scaling`);
- stalled: requests wait, and its engine makes no step;
- suspicious: it computed other tokens than two others (`cluster.replay`); slow: as `cluster.health` finds;
- standby: it is ready, and gets no requests until another one is lost (`cluster.standby`);
- idle: no engine runs, and a request starts one; running: none of these.
"""
NOT_WELL: Final[frozenset[ReplicaState]] = frozenset({"lost", "starting", "draining", "drained", "stalled", "suspicious"})
"""States in which a replica does not serve requests as it should."""
StepCoefficients = tuple[float, float, float, float]
"""Seconds (per step, per token, per key attended, per key read) of `scheduler.StepCost`; all zero while unknown."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """The load of one replica at a moment.

    Attributes:
        index: its place among the replicas, from 0.
        is_accepting: it runs or is idle, its queue has room, and it is not drained.
        is_idle: no engine runs, and a request starts one.
        state: how it is, for operators and controllers.
        num_requests: requests that it has, waiting ones included.
        num_waiting: requests without a slot yet.
        num_held: beam searches of these that wait for the share of all searches, beside which slots may be free.
        num_held_tokens: tokens of their prompts.
        num_queued: sequences without a slot after its last step, those that came from other replicas included, but no searches
            that wait for their share.
        num_pending_tokens: prompt tokens of requests without a first token.
        num_sequences: answers of its requests that have not ended; 0 if nothing predicts their lengths.
        num_slots: answers that it computes at once, fewer than configured if memory is short; 0 if unknown.
        num_expected_tokens: tokens that these answers are expected to get yet (`cluster.lengths`).
        num_used_blocks, num_total_blocks: KV blocks after its last step, 0 before the first one; without a request none are
            used.
        num_routed: requests routed to it so far.
        num_migrated: requests among those that were moved to it while they ran.
        num_kv_loads: how often KV came to it from another replica; in several rounds for a request that ran.
        num_prefix_copies: copies of hot prefixes among those loads (`cluster.hot_prefixes`).
        capacity: its speed relative to the others.
        role: what it computes.
        cost: the times of its steps.
        transfer_token_s: seconds that KV of a token takes to come to it from another replica; 0 before the first transfer.
        slowness: how many times as long as the others' its steps take (`cluster.health`); 1 while unknown.
        is_slow: it gets no requests because of that.
        num_mismatches: how often it computed other tokens than another replica (`cluster.replay`).
        is_standby: it gets no requests until another replica is lost.
        is_stopped: it has no engine or is about to have none, because fewer replicas are enough.
        num_promotions: how often it took the place of another one.
        num_restarts: engines that were started in place of one of its own that had died or hung.
        pid: process id of its engine, if that is a process of this machine.
    """

    index: int
    is_accepting: bool = True
    is_idle: bool = False
    state: ReplicaState = "running"
    num_requests: int = 0
    num_waiting: int = 0
    num_held: int = 0
    num_held_tokens: int = 0
    num_queued: int = 0
    num_pending_tokens: int = 0
    num_sequences: int = 0
    num_slots: int = 0
    num_expected_tokens: float = 0.0
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    num_routed: int = 0
    num_migrated: int = 0
    num_kv_loads: int = 0
    num_prefix_copies: int = 0
    capacity: float = 1.0
    role: Role = "mixed"
    cost: StepCoefficients = (0.0, 0.0, 0.0, 0.0)
    transfer_token_s: float = 0.0
    slowness: float = 1.0
    is_slow: bool = False
    num_mismatches: int = 0
    is_standby: bool = False
    is_stopped: bool = False
    num_promotions: int = 0
    num_restarts: int = 0
    pid: int | None = None

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Returns the predicted time of a prompt of `num_tokens`, of which `num_cached` are cached."""
        num_new = num_tokens - num_cached
        per_step, per_token, per_attended, _ = self.cost
        return per_step + per_token * num_new + per_attended * num_new * (num_cached + num_new / 2)

    def decode_s(self, num_sequences: int) -> float:
        """Returns the predicted time of a step that computes a token of each of this many answers."""
        per_step, per_token, _, _ = self.cost
        return per_step + per_token * num_sequences

    @property
    def num_steps_to_slot(self) -> float:
        """Steps until one more request gets a slot: 0 while one is free, otherwise until enough answers have ended, if answers
        end at random after their expected mean length."""
        num_over = self.num_sequences - self.num_slots + 1
        if self.role == "prefill" or not self.num_slots or num_over <= 0:
            return 0.0
        return num_over * self.num_expected_tokens / (self.num_sequences * self.num_slots)

    @property
    def slot_wait_s(self) -> float:
        """Predicted time until one more request gets a slot."""
        return self.num_steps_to_slot * self.decode_s(self.num_slots)

    def without_held(self) -> ReplicaSnapshot:
        """Returns its load for a request that is no beam search: searches that wait for their share hold it up in nothing."""
        if not self.num_held:
            return self
        return replace(
            self,
            num_requests=self.num_requests - self.num_held,
            num_waiting=self.num_waiting - self.num_held,
            num_pending_tokens=self.num_pending_tokens - self.num_held_tokens,
            num_held=0,
            num_held_tokens=0,
        )

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
        has_slot: it runs; False: it waits for its first slot, or again.
        is_held: it is a beam search that waits for the share of all searches.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_sequences: int = 1
    priority: int = 0
    has_slot: bool = True
    is_held: bool = False


@dataclass(slots=True)
class LengthErrors:
    """How wrong predictions were: counts over all answers that the model ended.

    Attributes:
        num_answers: answers that were predicted and have ended.
        num_tokens, num_error_tokens: sum of their lengths, and of the absolute errors of the predicted means.
        num_above_p90: those that were longer than the predicted 90th percentile; a tenth of them if it is right.
    """

    num_answers: int = 0
    num_tokens: int = 0
    num_error_tokens: float = 0.0
    num_above_p90: int = 0


@dataclass(frozen=True, slots=True)
class UpdateProgress:
    """The progress of a rolling update (`RequestClient.update_replicas`).

    Attributes:
        num_updated: replicas that have their new engine.
        num_replicas: of the server.
        is_running: it has not ended.
        error: why it ended early; empty if it did not. Replicas that were not updated keep their engines.
        is_rolling_back: it has failed, and replicas with new weights get the old ones back.
    """

    num_updated: int
    num_replicas: int
    is_running: bool
    error: str = ""
    is_rolling_back: bool = False
