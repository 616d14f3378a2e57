"""The scheduler's state of a request and of each of its sequences. Pure: no I/O, no clock."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from cloister.kv import BlockTable
from cloister.types.layerwise import LayerwisePlan
from cloister.types.request import Request
from cloister.types.step import MAX_SCORED_ROWS, NewSequence

if TYPE_CHECKING:
    from cloister.scheduler.beam_search import Beams


class Status(Enum):
    """The state of a sequence. Only WAITING ones are in a queue, only RUNNING ones are planned."""

    NEW = "new"
    LOADING = "loading"
    """Waits for KV from another engine or a tier, and is queued then."""
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTING = "preempting"
    """Releases its blocks and waits again once no plan in flight names it."""
    ENDED = "ended"


class RequestState:
    """One request from arrival to its last sequence's end: the engine's only record of it (`decisions/0016`).

    Attributes:
        arrival_s, deadline_s: on the engine's clock.
        grammar_deadline_s: for a request in `Scheduler.waiting_for_grammar`: latest time at which the engine checks its grammar
            again.
        num_prompt_tokens: length of its prompt.
        order: arrival rank, for first come first served.
        seed: seed of the sampling noise, from the client or drawn.
        root: root of its prefix-key chain.
        kept_root: the same for tiers (`sequence_prefixes.kept_root`).
        owner: owner whose share of the prefix cache is charged for its blocks; None for none.
        num_open: sequences that have not ended.
        beams: the beam search that its sequences belong to; None if they are answers themselves.
        num_beam_tokens: tokens that its beams were extended by, all together, which quotas count.
        hold_kv_s: for how long its cached blocks are leased when it ends.
        prefill_only: it leaves after its first token.
        is_forgotten: the cache of its scope was dropped while it was open; no further block of it is cached.
    """

    __slots__ = (
        "arrival_s",
        "beams",
        "deadline_s",
        "first_token_s",
        "grammar_deadline_s",
        "hold_kv_s",
        "is_forgotten",
        "kept_root",
        "num_beam_tokens",
        "num_cached_tokens",
        "num_open",
        "num_prompt_tokens",
        "order",
        "owner",
        "prefill_only",
        "request",
        "root",
        "scheduled_s",
        "seed",
        "sequences",
        "stop_token_ids",
    )

    def __init__(self, request: Request, *, now: float, order: int, seed: int, root: bytes, owner: bytes | None = None) -> None:
        self.request = request
        self.num_prompt_tokens = len(request.token_ids)
        self.arrival_s = now
        self.deadline_s = now + request.timeout_s
        self.order = order
        self.seed = seed
        self.root = self.kept_root = root
        self.owner = owner
        self.grammar_deadline_s = 0.0
        self.stop_token_ids: tuple[int, ...] = ()
        self.num_open = request.sampling.n
        self.num_cached_tokens = 0
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.sequences: list[SequenceRecord] = []
        self.beams: Beams | None = None
        self.num_beam_tokens = 0
        self.hold_kv_s = 0.0
        self.prefill_only = False
        self.is_forgotten = False

    @property
    def num_unforked(self) -> int:
        """Number of sequences that will fork when the prompt is computed."""
        num_sequences = self.request.sampling.n if self.beams is None else self.beams.search.width
        return num_sequences - len(self.sequences)


class SequenceRecord:
    """One continuation of a request, as counts (plans hold no token ids).

    Attributes:
        token_ids: prompt and committed output.
        num_planned: positions planned so far, including those in flight.
        num_committed: positions whose KV was computed.
        num_pending: number of tokens that plans in flight will sample.
        num_in_flight: number of plans in flight that name it.
        num_drafts: draft positions in a plan in flight; how many will be accepted is unknown.
        drafting: its statistics for `scheduler.speculation`.
        scheduling: its record in the scheduling policy.
        keys: prefix keys of its full blocks, computed as needed.
        num_kept: number of leading blocks offered to the prefix cache.
        snapshots: numbers of leading entries of its block table behind which the state is kept for later hits.
        last_snapshot: the same for the latest other state that was kept; 0 for none.
        is_behind: a step has deferred its token (`StepResult.deferred`); it is planned again when no plan in flight names it.
        is_unknown: it runs, but no plan has introduced it to the runner yet.
        may_restore: before it starts, a tier may be asked for its KV (`scheduler.kv_restores`).
        is_layerwise: its prompt is computed layer by layer (`scheduler.layerwise`). Planned and committed positions then
            measure progress, and no KV is complete before the last one.
        layerwise: the plan of that, while it runs.
    """

    __slots__ = (
        "drafting",
        "index",
        "is_behind",
        "is_layerwise",
        "is_unknown",
        "keys",
        "last_snapshot",
        "layerwise",
        "max_output",
        "may_restore",
        "num_committed",
        "num_drafts",
        "num_in_flight",
        "num_kept",
        "num_pending",
        "num_planned",
        "request_state",
        "scheduling",
        "seq_id",
        "snapshots",
        "status",
        "table",
        "token_ids",
    )

    def __init__(self, seq_id: int, state: RequestState, index: int, token_ids: list[int], max_output: int) -> None:
        self.seq_id = seq_id
        self.request_state = state
        self.index = index
        self.token_ids = token_ids
        self.max_output = max_output
        self.status = Status.NEW
        self.num_planned = 0
        self.num_committed = 0
        self.num_pending = 0
        self.num_in_flight = 0
        self.num_kept = 0
        self.snapshots: tuple[int, ...] = ()
        self.last_snapshot = 0
        self.num_drafts = 0
        self.drafting: object | None = None
        self.scheduling: object | None = None
        self.is_behind = False
        self.is_unknown = False
        self.may_restore = True
        self.is_layerwise = False
        self.layerwise: LayerwisePlan | None = None
        self.keys: list[bytes] = []
        self.table: BlockTable | None = None

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.request_state.num_prompt_tokens

    @property
    def num_wanted(self) -> int:
        """Positions still to plan for all known tokens and all that plans in flight will sample."""
        if self.num_drafts or self.is_behind:
            return 0
        num_coming, state = len(self.token_ids), self.request_state
        if state.beams is None:  # the next tokens of beams are chosen when all of them are computed
            num_coming += self.num_pending
        if self.max_output and num_coming - state.num_prompt_tokens >= self.max_output:
            return 0  # the token that ends it is sampled or in flight; its own KV is never read
        return num_coming - self.num_planned

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts in its next step: with the token after them they at most reach the end of the answer.

        0 until the first token was sampled (with n > 1 the other sequences fork there), and while drafts are pending.
        """
        if self.num_pending or self.num_drafts or not self.num_output or self.request_state.beams is not None:
            return 0
        return max(0, self.max_output - self.num_output - 1)

    @property
    def max_chunk(self) -> int:
        """Positions that one step may compute for it."""
        request, num_most = self.request_state.request, self.num_wanted
        if request.documents is not None and (end := request.documents.find_piece_end(self.num_planned)) is not None:
            num_most = min(num_most, end - self.num_planned)
        is_scored = request.sampling.prompt_logprobs is not None and self.index == 0
        return min(num_most, MAX_SCORED_ROWS) if is_scored else num_most

    @property
    def cost_start(self) -> int:
        """Start of its next positions for the cost of attention: positions computed layer by layer see half of the prompt on
        average."""
        how = self.layerwise
        return self.num_planned if how is None else how.first + how.num_positions // 2

    @property
    def num_slots(self) -> int:
        """Running slots that it needs: its own, and one for each beam that will fork from it. Answers need none: those that
        find no free slot when the prompt is computed are queued (`StepPlanner._fork`)."""
        state = self.request_state
        return 1 + (state.num_unforked if self.index == 0 and state.beams is not None else 0)


def table_of(sequence: SequenceRecord) -> BlockTable:
    """Returns the block table of a running sequence."""
    if sequence.table is None:
        raise AssertionError("a sequence without blocks was treated as running")
    return sequence.table


def introduce(sequence: SequenceRecord) -> NewSequence:
    """Returns the introduction of a sequence for the runner."""
    state = sequence.request_state
    sampling = state.request.sampling
    if state.beams is not None:
        sampling = msgspec.structs.replace(sampling, n=1, temperature=0.0, logprobs=state.beams.num_candidates)
    elif sequence.index and sampling.prompt_logprobs is not None:  # the first sequence scores the prompt for all
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return NewSequence(
        seq_id=sequence.seq_id,
        token_ids=list(sequence.token_ids),
        num_prompt_tokens=state.num_prompt_tokens,
        sampling=sampling,
        seed=state.seed,
        index=sequence.index,
        stop_token_ids=state.stop_token_ids,
        adapter=state.request.adapter,
        pooling=state.request.pooling,
        images=state.request.images,
        documents=state.request.documents,
    )
