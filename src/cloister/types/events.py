"""The event stream from which metrics, traces, benchmarks and usage counts derive (one source for every figure).

Times are of one monotonic clock, in seconds. Events carry counts and ids, never content.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cloister.types.request import AdapterInfo, FinishReason, ModelInfo, Request, SequenceOutput
from cloister.types.scope import Scope


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """A request reached the engine."""

    request_id: str
    now_s: float
    num_prompt_tokens: int


class Scheduled(msgspec.Struct, frozen=True, tag=True):
    """A request got its first slot in a plan (again after a preemption: `resumed`).

    `num_queried_tokens` of its prompt were looked up in the prefix cache: all or none.
    """

    request_id: str
    now_s: float
    queue_s: float
    num_cached_tokens: int
    num_prompt_tokens: int
    resumed: bool = False
    num_queried_tokens: int = 0


class PrefixTaken(msgspec.Struct, frozen=True, tag=True):
    """A running request skips prompt tokens: their KV is in the prefix cache by now, or has come from a tier meanwhile."""

    request_id: str
    now_s: float
    num_tokens: int


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A running sequence lost its blocks and waits again."""

    request_id: str
    now_s: float


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The engine of a request ended; the request waits until another one resumes it. Reported by the front."""

    request_id: str
    now_s: float


class Migrated(msgspec.Struct, frozen=True, tag=True):
    """A request left its engine for another one, which goes on with it. Reported by the front."""

    request_id: str
    now_s: float


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """`num_tokens` output tokens of a sequence were committed."""

    request_id: str
    seq_id: int
    index: int
    now_s: float
    num_tokens: int
    first: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A sequence ended; the last one of a request carries `last=True`, exactly once per request.

    `num_beam_tokens`, of the last one, are all that the beams of a search were extended by, also where no answer has them.
    """

    request_id: str
    seq_id: int
    index: int
    now_s: float
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    arrival_s: float
    first_token_s: float | None
    last: bool
    stop_reason: str | int | None = None
    error: str | None = None
    num_beam_tokens: int = 0


class Drafting(msgspec.Struct, frozen=True):
    """The counts of one drafter in a step, over all sequences.

    Attributes:
        num_drafts: number of sequences for which it drafted.
        drafted, accepted: tokens by their position in the drafter's order of confidence; the last positions may be missing.
        draft_s: its time in seconds.
    """

    drafter: str
    num_drafts: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_s: float


class KVStored(msgspec.Struct, frozen=True):
    """What a tier has written since it was last reported, and what it holds.

    Attributes:
        tier: its name.
        num_bytes: KV written.
        used_bytes: bytes of its slots in use.
        oldest_s: age of its oldest block; None if it has none.
    """

    tier: str
    num_bytes: int
    used_bytes: int
    oldest_s: float | None = None


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """One step ran: its counts, and the load of the engine."""

    now_s: float
    elapsed_s: float
    num_tokens: int
    num_samples: int
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_cached_blocks: int
    num_total_blocks: int
    num_attended: float = 0.0
    """Keys read by attention, summed over the positions computed."""
    drafting: tuple[Drafting, ...] = ()
    """By drafter; only active ones."""
    gained_s: float = 0.0
    """Time that steps without drafts would have taken for the accepted drafts (`engine.drafting.weigh`)."""
    spent_s: float = 0.0
    """Time that drafting and verification added to the step; negative if it was faster than predicted."""
    stored: tuple[KVStored, ...] = ()
    """What each tier has written and holds, if either has changed."""
    num_held: int = 0
    """Beam searches of `num_waiting` that wait for the share of all searches: slots may be free beside them."""
    sampling_s: float = 0.0
    """Part of `elapsed_s` that depends on what requests ask of sampling (`step.StepResult.sampling_s`)."""
    num_scored: int = 0
    """Positions of prompts whose log-probabilities were computed: each has a row of logits."""
    processor_s: float = 0.0
    """Processor time of the engine's thread since its step before; 0 if the system does not say."""
    starved_s: float = 0.0
    """How long it was ready to run meanwhile and had no processor."""

    @property
    def plain_s(self) -> float:
        """Time of the step without what requests ask of sampling, and without drafting. Compare replicas by it: a client
        that asks for much of either makes only the rest longer."""
        return self.elapsed_s - self.sampling_s - sum([drafter.draft_s for drafter in self.drafting])

    @property
    def num_queued(self) -> int:
        """Sequences that wait because no slot, or no memory, is free."""
        return self.num_waiting - self.num_held


class KVLoaded(msgspec.Struct, frozen=True, tag=True):
    """A load of KV from another engine (`Submit.kv_source`, `PrefetchKV`) or from a tier has ended, exactly once for each.

    Attributes:
        elapsed_s: its duration; of one that followed a prompt (`PrefetchKV.follows`) how long the request waited for it.
        num_tokens: leading tokens of the request that a prefix hit covers now.
        num_bytes: KV that arrived.
        complete: all that the other engine offered, or that the tier was to have, arrived; if not, the rest is computed.
        tier: the tier that it came from; empty for another engine.
    """

    request_id: str
    now_s: float
    num_tokens: int
    num_bytes: int
    elapsed_s: float
    complete: bool
    tier: str = ""


class PrefillDone(msgspec.Struct, frozen=True, tag=True):
    """A request that was here for its prefill only has its first token, which was sent as output; it leaves without `Ended`,
    and another engine goes on with it (`Submit.prefill_only`).

    Attributes:
        seq_ids: of its sequences that had not ended.
        num_cached_tokens: prompt tokens read from the prefix cache.
    """

    request_id: str
    now_s: float
    seq_ids: tuple[int, ...]
    num_cached_tokens: int


Event = Arrived | Scheduled | PrefixTaken | Preempted | Lost | Migrated | Progressed | Ended | Stepped | KVLoaded | PrefillDone


class Resumption(msgspec.Struct, frozen=True):
    """What a request had when its engine was lost, or when it left that one. Times are durations: engines need not share a
    clock.

    Attributes:
        token_ids: the output so far of each of its n sequences.
        ended: indexes of the sequences that have ended.
        waited_s: time since it arrived at its first engine; its deadline goes on from there.
        first_token_after_s: time from its arrival to its first token; None if it has none.
        was_scheduled: it had a slot before.
        num_cached_tokens: prompt tokens that its first engine read from the prefix cache.
    """

    token_ids: list[list[int]]
    ended: tuple[int, ...] = ()
    waited_s: float = 0.0
    first_token_after_s: float | None = None
    was_scheduled: bool = False
    num_cached_tokens: int = 0

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Resumption(num_tokens={[len(ids) for ids in self.token_ids]})"


class KVSource(msgspec.Struct, frozen=True):
    """An engine that has KV of the beginning of a request.

    Attributes:
        endpoint: where it serves it (`Ready.kv_endpoint`).
    """

    endpoint: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: a new request, or one to resume.

    Attributes:
        seed: seed of the sampling noise if the request has none; None lets the engine draw it.
        resumption: what it had in the engine before; its answer goes on with the next token.
        kv_source: another engine whose KV of the prompt and the resumed tokens is loaded first (decisions/0022).
        hold_kv_s: after the request has ended, its KV stays cached for so long, or until another engine has loaded it.
        prefill_only: leave after the first token (`PrefillDone`); a request that it completes ends as always.
    """

    request: Request
    seed: int | None = None
    resumption: Resumption | None = None
    kv_source: KVSource | None = None
    hold_kv_s: float = 0.0
    prefill_only: bool = False


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: abort this request."""

    request_id: str


class HoldKV(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: the KV that a request has so far stays cached for `hold_s` seconds, or until another engine has loaded
    it, even if the request ends. 0 ends that."""

    request_id: str
    hold_s: float


class PrefetchKV(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: load KV of a request that may come here later; it ends with `KVLoaded`.

    Attributes:
        request: whose scope, adapter and images the KV has, and whose id `KVLoaded` has. It is not added.
        token_ids: the prompt, and the output so far of its first sequence.
        follows: the source is computing the prompt: blocks are loaded as they are done, until the last one is. If the request
            comes meanwhile (`Submit.kv_source`), it waits for the rest of this load (decisions/0037).
    """

    request: Request
    token_ids: list[int]
    source: KVSource
    follows: bool = False

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"PrefetchKV(num_tokens={len(self.token_ids)})"


class CancelPrefetch(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: the request of a `PrefetchKV` does not come. Its load ends, and what it brought is not kept for it."""

    request_id: str


class LeasePrefix(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: keep KV of the beginning of a prompt under a lease (decisions/0052). The reply is `PrefixLeased`.

    Attributes:
        name: of the lease.
        request: a request that begins with the prefix and ends one token behind it, whose id is `name`. It is not added.
        lease_s: the lease ends after this time, unless it is renewed.
        source: where to load it from: then this is a copy, which counts against no scope's share of the cache and goes with the
            lease. None: only what is cached here is kept.
    """

    name: str
    request: Request
    lease_s: float
    source: KVSource | None = None

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"LeasePrefix(num_tokens={len(self.request.token_ids) - 1})"


class RenewPrefix(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: the lease `name` ends so many seconds from now; 0 ends it at once."""

    name: str
    lease_s: float


class PrefixLeased(msgspec.Struct, frozen=True, tag=True):
    """Engine to front, in `Outputs`: a lease of a prefix has begun, or has ended though the front did not end it.

    Attributes:
        num_tokens: of the prefix that are leased; 0: there is no such lease (any more).
    """

    name: str
    num_tokens: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: read the adapter in the directory `path`."""

    call_id: str
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: accept no more requests for this adapter, and unload it when those that use it have ended."""

    call_id: str
    name: str


class AdapterReply(msgspec.Struct, frozen=True, tag=True):
    """Engine to front, in `Outputs`: the result of an adapter call.

    Attributes:
        adapter: the loaded adapter.
        error, code: why the call failed; without user content.
    """

    call_id: str
    adapter: AdapterInfo | None = None
    error: str | None = None
    code: str = ""


class InspectCache(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: report what is cached of one scope.

    Attributes:
        drop: drop it after it was counted. Requests that are in the engine keep what they use, and it is not cached again.
    """

    call_id: str
    scope: Scope
    drop: bool = False


class CacheUsage(msgspec.Struct, frozen=True):
    """What is cached of one scope in one place.

    Attributes:
        place: `device`, or the name of a tier.
        num_blocks: blocks, of all groups of layers.
        num_tokens: tokens of which some layers have their KV there.
        oldest_s: age of the oldest block; None if there is none.
        used_s: time since a block was last added or found; None if there is none.
    """

    place: str
    num_blocks: int
    num_tokens: int
    num_bytes: int
    oldest_s: float | None
    used_s: float | None


class CacheReply(msgspec.Struct, frozen=True, tag=True):
    """Engine to front, in `Outputs`: what is cached, or was until it was dropped."""

    call_id: str
    places: list[CacheUsage]


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: answer, to show that the engine's loop runs. The answer is the message of a step, or an empty one."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: finish running requests within `timeout_s`, then exit."""

    timeout_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: the model is loaded."""

    model: ModelInfo
    memory: list[tuple[str, int]]
    """Itemised memory budget: (what, bytes)."""
    adapters: list[AdapterInfo] = []
    startup: list[tuple[str, float]] = []
    """Startup times by phase: (what, seconds)."""
    kv_endpoint: str | None = None
    """Where other engines load its KV from: "shm:NAME" on one machine, "tls://HOST:PORT" from others, or both with a comma
    between; None: nowhere."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: why it cannot start; sent once before it exits.

    Attributes:
        fit: `MemoryBudgetError.fit`.
    """

    message: str
    code: str
    fit: float | None = None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: outputs and events of a step."""

    outputs: list[SequenceOutput]
    events: list[Event]
    replies: list[AdapterReply | CacheReply | PrefixLeased] = []


FrontMessage = (
    Submit
    | Abort
    | HoldKV
    | PrefetchKV
    | CancelPrefetch
    | LeasePrefix
    | RenewPrefix
    | LoadAdapter
    | UnloadAdapter
    | InspectCache
    | Ping
    | Shutdown
)
EngineMessage = Ready | Failed | Outputs

ABORTED: Final = "the request was ended before its answer was complete: its client disconnected, or the server is shutting down"


def end_output(ended: Ended) -> SequenceOutput:
    """Returns the last output of a sequence without new text."""
    return SequenceOutput(
        request_id=ended.request_id,
        index=ended.index,
        finish_reason=ended.reason,
        stop_reason=ended.stop_reason,
        error=ended.error or (ABORTED if ended.reason is FinishReason.ABORT else None),
        num_prompt_tokens=ended.num_prompt_tokens,
        num_output_tokens=ended.num_output_tokens,
        num_cached_tokens=ended.num_cached_tokens,
    )
