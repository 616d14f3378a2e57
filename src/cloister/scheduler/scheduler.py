"""The scheduler. It has no separate steps for prefill and decode (no phases): it plans positions of each sequence until the
computed positions catch up with the known and drafted ones. Pure: no I/O, no clock, no arrays, no random source; it takes
`now`.

`plan` may be called again before the previous plan was committed; commits are in the order of plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from cloister.kv import (
    DEVICE,
    NO_BLOCK,
    BlockPool,
    BlockTable,
    CacheQuotas,
    KeptUsage,
    OutOfBlocksError,
    PrefixKeys,
    StepTime,
)
from cloister.kv.tiers import KVTiers
from cloister.scheduler.admission import EngineLimits, count_beam_slots, count_positions, find_refusal
from cloister.scheduler.beam_search import Beams, BeamSearches
from cloister.scheduler.budget import BudgetConfig, StepBudget, StepCost
from cloister.scheduler.draft_allocator import DraftAllocator
from cloister.scheduler.image_encodings import ImageEncodings
from cloister.scheduler.kv_exports import KVExports, cut_prompt
from cloister.scheduler.kv_loads import KVLoads
from cloister.scheduler.kv_restores import KVRestores, TierRead
from cloister.scheduler.layerwise import LayerwisePrompts
from cloister.scheduler.planned_step import PlannedStep
from cloister.scheduler.policies import POLICIES, EngineView
from cloister.scheduler.prefix_leases import PrefixLeases
from cloister.scheduler.request_table import RequestTable, table_of
from cloister.scheduler.sequence import RequestState, SequenceRecord, Status, introduce
from cloister.scheduler.speculation import NO_DRAFTS, DraftDecision, Speculation
from cloister.types.events import Event, Progressed, Resumption, Scheduled
from cloister.types.layerwise import CellLayout
from cloister.types.request import FinishReason, Request
from cloister.types.scope import Scope
from cloister.types.step import EncodedImage, Fork, NewSequence, Sample, SequencePlan, StepPlan, StepResult, Stop

_UNBOUNDED = 2**62
"""Capacity in positions if every layer has a window: the blocks of a request then do not grow with its length."""
BURST_S = 0.5
"""Requests that arrive within this time of each other form a burst."""
BURST_LASTS_S = 1.0
"""A request counts as part of a new burst for this long after its first token."""
BURST_FLOOR_S = 0.2
"""A step of this time is short enough for requests of a new burst."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a scheduler.

    Attributes:
        max_model_len: prompt and output of one sequence, in tokens.
        max_num_seqs: maximum number of running sequences.
        eos_token_ids: ids that end an answer, unless a request ignores them.
        prefix_cache: keep and reuse the KV of full blocks.
        cache_scopes: number of scopes with their own share of the prefix cache; 0 for one shared cache.
        num_images_at_once: images that are encoded at once, beside the steps.
        max_prefill_only_len: the longest prompt of a request that ends with it; less than `max_model_len` changes nothing.
        weighs_documents: the program can weigh documents by a temperature and a scale.
        places_documents: tokens of documents may turn by other positions than they stand at.
    """

    max_model_len: int
    max_num_seqs: int = 64
    policy: str = "fcfs"
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    cache_scopes: int = 0
    num_images_at_once: int = 1
    max_prefill_only_len: int = 0
    weighs_documents: bool = True
    places_documents: bool = True


class Scheduler:
    """Decides which positions of which sequences are computed next, and where their KV lives.

    Args:
        config: its limits.
        pool: the KV blocks that it allocates.
        keys: computes prefix keys; None switches the prefix cache off.
        speculation: decides how many tokens to draft; None disables drafts.
        cells: of the program, if it may compute prompts layer by layer.

    Attributes:
        prefix_cache: the prefix cache, if there is one.
        requests: states of the requests that have not ended, by id. Only the scheduler changes them, except for
            `grammar_deadline_s`, which the engine may set.
        waiting_for_grammar: requests waiting for a grammar, by id; `release` queues them.
        held_searches: beam searches of `num_waiting` that wait for the share of all searches, by id.
        leases: cached blocks that stay for other engines; None without a prefix cache.
        kv_loads, kv_exports: KV on its way here, and from here, with what the engine must tell them.
        prefix_leases: prefixes that the front has leased here, copies among them.
        kv_restores: KV that comes back from tiers; None without them (`use_tiers`).
        answers: finished answers of beam searches that were not collected yet, each as a new sequence with prompt and whole
            output.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        keys: PrefixKeys | None = None,
        speculation: Speculation | None = None,
        cells: CellLayout | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.cost = StepCost()
        self._policy = POLICIES.get(config.policy)()
        keys = keys if config.prefix_cache else None
        num_public = len(keys.public) if keys is not None else 0
        self._num_usable = [group.num_blocks - (0 if group.is_state else num_public) for group in pool.groups]
        quotas = None
        if keys is not None and config.cache_scopes:
            num_longest = -(-config.max_model_len // pool.block_size)
            quotas = [
                CacheQuotas.plan(config.cache_scopes, group.num_blocks, 2 * config.max_num_seqs)
                if group.is_state
                else CacheQuotas.plan(config.cache_scopes, group.num_blocks - num_public, group.max_held or num_longest)
                for group in pool.groups
            ]
            for number, share in enumerate(quotas):  # a sequence that runs alone must fit beside full shares
                self._num_usable[number] -= share.num_most
        self._layerwise = None if cells is None else LayerwisePrompts(cells, pool, self._num_usable[0])
        self._requests = RequestTable(pool, self._policy, keys, quotas)
        self._draft_allocator = (
            DraftAllocator(speculation, self._requests, self._policy, self.cost, config.max_num_seqs)
            if speculation is not None
            else None
        )
        # Each sequence takes a state, and another one for a step.
        states = [group.num_blocks // 2 for group in pool.groups if group.is_state]
        self._max_num_seqs = min([config.max_num_seqs, *states])
        self._policy.attach(
            EngineView(
                self.cost,
                self._max_num_seqs,
                min(self._count_usable(1), pool.num_total * pool.block_size),
                self._requests.running,
                self._requests.count_cached,
                self._would_fit,
            )
        )
        self._has_windows = any(group.window is not None for group in pool.groups)
        self._searches = BeamSearches(self._requests, count_beam_slots(self._max_num_seqs))
        self._encodings = ImageEncodings(config.num_images_at_once)
        self.prefix_cache = self._requests.prefix_cache
        self._time = StepTime() if self.prefix_cache is None else self.prefix_cache.kept.time
        self.requests: Mapping[str, RequestState] = self._requests.request_states
        self.waiting_for_grammar: Mapping[str, RequestState] = self._requests.waiting_for_grammar
        self.held_searches: Mapping[str, RequestState] = self._requests.held_searches
        self.answers = self._requests.answers
        self.leases = self._requests.leases
        self.kv_loads = KVLoads(self._requests)
        self.prefix_leases = PrefixLeases(self._requests, self.kv_loads)
        self._prefilled: list[SequenceRecord] = []  # of this step, with a token that another engine goes on from
        self.kv_exports = KVExports(self._requests)
        self.kv_restores: KVRestores | None = None
        self._most_shared = (
            None
            if quotas is None
            else min((q.per_scope for q, group in zip(quotas, pool.groups, strict=True) if group.window is None), default=None)
        )  # entries of a prefix that the cache keeps for one scope
        self._steps: deque[PlannedStep] = deque()
        self._next_plan = 0

    @property
    def lacks_shares(self) -> bool:
        """Whether its prefix cache keeps nothing: there are too few blocks to give each scope a share."""
        return self._most_shared == 0

    @property
    def max_layerwise_positions(self) -> int:
        """Positions of the longest prompt that there is memory for if it is computed layer by layer; 0 if none can be."""
        return 0 if self._layerwise is None else self._layerwise.max_positions

    def use_tiers(self, tiers: KVTiers) -> None:
        """Has tiers keep what the prefix cache evicts. Call it before the first request, with a prefix cache only."""
        assert self.prefix_cache is not None
        self.prefix_cache.tiers = tiers
        tiers.use_time(self._time)
        self.kv_restores = KVRestores(tiers, self._requests, self.prefix_cache, self.kv_loads, self.cost, self._most_shared)

    # State

    @property
    def num_running(self) -> int:
        return len(self._requests.running)

    @property
    def num_waiting(self) -> int:
        return self._requests.num_waiting + len(self.held_searches)

    @property
    def next_deadline_s(self) -> float | None:
        """When `plan` must be called again even without new input."""
        dues = [due for due in (self._requests.next_deadline_s, self.kv_loads.next_deadline_s) if due is not None]
        return min(dues, default=None)

    def take_events(self) -> list[Event]:
        """Returns the events since the last call, oldest first."""
        events, self._requests.events = self._requests.events, []
        return events

    def take_answers(self) -> list[NewSequence]:
        """Removes and returns `answers`."""
        answers = self.answers[:]
        self.answers.clear()
        return answers

    # Adding and ending requests

    def add(
        self,
        request: Request,
        now: float,
        *,
        seed: int = 0,
        refusal: str | None = None,
        grammar_deadline_s: float | None = None,
        resumption: Resumption | None = None,
        loads_kv: bool = False,
        hold_kv_s: float = 0.0,
        prefill_only: bool = False,
    ) -> None:
        """Adds a request. One that can never run ends immediately as REJECTED, with the reason and a figure that would fit.

        Args:
            seed: seed of the sampling noise, if the request has none.
            refusal: why it can never run, if the caller knows.
            grammar_deadline_s: set if its grammar is still being compiled: `release` queues it, and the caller checks again by
                this time. None queues it immediately.
            resumption: what it had in an engine that was lost.
            loads_kv: it waits for KV from another engine (`kv_loads`), and is queued then.
            hold_kv_s, prefill_only: as in `Submit`.
        """
        seed = request.sampling.seed if request.sampling.seed is not None else seed
        state = self._requests.enlist(request, now, seed, resumption)
        state.hold_kv_s, state.prefill_only = hold_kv_s, prefill_only
        eos = () if request.sampling.ignore_eos else self.config.eos_token_ids
        state.stop_token_ids = tuple(dict.fromkeys((*eos, *request.sampling.stop_token_ids)))
        most = 0 if request.pooling is not None else request.sampling.max_tokens
        max_output = min(
            self.config.max_model_len - state.num_prompt_tokens,
            most if most is not None else self.config.max_model_len,
        )
        has_output = resumption is not None and any(resumption.token_ids)
        is_layerwise = not (has_output or prefill_only) and self._fits_only_layerwise(request)
        if is_layerwise:
            max_output = most or 0
        if request.sampling.beams is not None:
            state.beams = Beams(request.sampling.beams, state.stop_token_ids, max_output)
        if resumption is not None and has_output:
            self._requests.resume(state, resumption, max_output)
        else:
            sequence = self._requests.make_sequence(state, 0, list(request.token_ids), max_output)
            sequence.is_layerwise = is_layerwise
            if state.beams is not None:
                state.beams.start({sequence.seq_id: 0.0})
        num_kv_tokens = self._count_usable(1 if request.sampling.beams is None else request.sampling.beams.width)
        limits = EngineLimits(
            self.config.max_model_len,
            self._max_num_seqs,
            num_kv_tokens,
            self.pool.block_size,
            self.config.budget.max_tokens,
            takes_documents=len(self.pool.groups) == 1
            and self.pool.groups[0].window is None
            and not self.pool.groups[0].is_state,
            weighs_documents=self.config.weighs_documents,
            places_documents=self.config.places_documents,
        )
        if is_layerwise and self._layerwise is not None:
            longest = self.config.max_prefill_only_len + int(max_output > 0)
            limits = replace(limits, max_model_len=longest, num_kv_tokens=self._layerwise.max_positions)
        refusal = refusal or find_refusal(request, limits)
        if refusal is None and state.beams is not None:
            refusal = state.beams.find_excess()
        if refusal is not None:
            self.kv_loads.cancel_prefetch(request.request_id, now)
            self._requests.end_request(state, FinishReason.REJECTED, now, error=refusal)
            return
        if grammar_deadline_s is not None:
            state.grammar_deadline_s = grammar_deadline_s
            self._requests.waiting_for_grammar[request.request_id] = state
        if loads_kv:
            self.kv_loads.begin(state, now)
        elif grammar_deadline_s is None:
            self._requests.wait_for_slots(state)

    def _fits_only_layerwise(self, request: Request) -> bool:
        """Whether a request ends with its prompt, and that is too long for KV of all layers."""
        num_most = min(self.config.max_model_len - int(request.sampling.max_tokens != 0), self._count_usable(1))
        if self._layerwise is None or len(request.token_ids) <= num_most:
            return False
        ends_with_prompt = request.sampling.ends_with_prompt and not request.images and request.documents is None
        return ends_with_prompt and self.config.max_prefill_only_len > self.config.max_model_len

    def _layerwise_of(self, sequence: SequenceRecord) -> LayerwisePrompts | None:
        """Returns what knows the memory of a sequence, if it is computed layer by layer."""
        return self._layerwise if sequence.is_layerwise else None

    def _count_usable(self, width: int) -> int:
        """Returns the positions that a sequence, or `width` beams together, can have while nothing else runs."""
        counts = [
            num_usable * self.pool.block_size
            for group, num_usable in enumerate(self._num_usable)
            if num_usable < self.pool.count_most(group, _UNBOUNDED, width)
        ]
        return min(counts, default=_UNBOUNDED)

    def release(self, state: RequestState) -> None:
        """Queues a request that waited for its grammar."""
        del self._requests.waiting_for_grammar[state.request.request_id]
        if not self.kv_loads.is_awaited(state.request.request_id):
            self._requests.wait_for_slots(state)

    def hold(self, request_id: str, hold_s: float, now: float) -> None:
        """Leases what a request has in the prefix cache so far, if it has not ended; 0 seconds end that."""
        state = self._requests.request_states.get(request_id)
        if hold_s <= 0.0:
            if self._requests.leases is not None:
                self._requests.leases.drop(request_id)
        elif state is not None:
            self._requests.hold(state, hold_s, now)

    def report_kept(self, scope: Scope) -> list[tuple[str, KeptUsage]]:
        """Returns what is kept of a scope on the device and in the tiers, each by its name."""
        if self.prefix_cache is None:
            return []
        roots, tiers = self._requests.roots_of(scope), self.prefix_cache.tiers
        below = () if tiers is None else tiers.indexes
        return [(DEVICE, self.prefix_cache.kept.report(roots)), *((tier.name, tier.kept.report(roots)) for tier in below)]

    def forget(self, scope: Scope, now: float) -> None:
        """Drops what is kept of a scope. What its requests and other engines use becomes free when they have ended."""
        roots = self._requests.roots_of(scope)
        self.prefix_leases.forget(roots)
        self._requests.forget(roots)
        self.kv_loads.forget(roots, now)

    def abort(self, request_id: str, now: float) -> None:
        """Aborts a request; does nothing if it has already ended."""
        state = self._requests.request_states.get(request_id)
        if state is not None:
            self._requests.end_request(state, FinishReason.ABORT, now)

    def fail(self, message: str, now: float) -> None:
        """Ends every request that a plan in flight names, and drops those plans, after a failed step."""
        steps, self._steps = list(self._steps), deque()
        for step in steps:
            self._land(step)
            self.kv_loads.fail(step, now)
            self._requests.departures.extend(step.plan.departures)
        for step in steps:
            for sequence in (*(part[0] for part in step.parts), *step.forked, *self._find_others(step)):
                if sequence.status is not Status.ENDED:
                    self._requests.end_request(sequence.request_state, FinishReason.ERROR, now, error=message)
                self._requests.release_blocks(sequence)
            self.pool.wipe_again(step.plan.wipes)

    def _find_others(self, step: PlannedStep) -> list[SequenceRecord]:
        """Returns the sequences that a plan introduces, or whose images it has encoded, without computing them."""
        named = {new.seq_id for new in step.plan.arrivals} | {seq_id for seq_id, _ in step.plan.encodes}
        others = [self._requests.sequences.get(seq_id) for seq_id in sorted(named - step.planned())]
        return [sequence for sequence in others if sequence is not None]

    # One step

    def plan(self, now: float) -> StepPlan | None:
        """Fills one step, or returns None if there is nothing to do (never while blocks wait to be wiped)."""
        self._time.now_s = now
        self._requests.expire(now)
        if self.kv_loads.loading:
            self.kv_loads.expire(now)
        if self.held_searches or self._searches.admitted:
            self._searches.admit(self._policy.choose_search)
        budget = StepBudget(self.cost, self.config.budget)
        step = PlannedStep(StepPlan(plan_id=self._next_plan), budget, now, self._policy.level_slack)
        self._fill(step)
        if self.kv_loads.loading:
            self.kv_loads.plan(step)
        plan = step.plan
        plan.wipes = self.pool.take_wipes()
        plan.departures, self._requests.departures = self._requests.departures, []
        if not (plan.sequences or plan.wipes or plan.loads or plan.departures or plan.arrivals or plan.encodes):
            return None
        self._next_plan += 1
        self._steps.append(step)
        return plan

    def commit(self, result: StepResult, stops: Mapping[int, Stop], now: float) -> list[Event]:
        """Commits the result of the oldest plan in flight, and returns every event since the last call.

        Args:
            stops: by seq_id, where output processing found the end of an answer.
        """
        step = self._steps.popleft()
        if step.plan.plan_id != result.plan_id:
            raise ValueError(f"plan {step.plan.plan_id} must be committed before plan {result.plan_id}")
        self._land(step)
        self._time.now_s = now
        size = step.budget.size
        if self._draft_allocator is not None and step.choices:
            size = self._draft_allocator.release_rejected(step, result)
        is_whole = not result.left_out  # else it was shorter than its size says
        block_size = self.pool.block_size
        for sequence, start, end, num_prefill in step.parts:
            if sequence.status is Status.RUNNING:
                num_decode = end - start - num_prefill
                if sequence.seq_id in result.left_out:
                    num_prefill, num_decode = (num_prefill - 1, num_decode) if num_prefill else (0, num_decode - 1)
                if num_prefill or num_decode:
                    self._policy.charge(sequence, num_prefill, num_decode)
                if sequence.seq_id in result.deferred:
                    end = self._defer(sequence)
                sequence.num_committed = end
                if end // block_size > sequence.num_kept and sequence.seq_id not in result.failures:
                    self._requests.keep_blocks(sequence)
                    self._requests.renew(sequence, now)
                    if self._has_windows:
                        table_of(sequence).pass_positions(end)
                if sequence.is_behind and not sequence.num_in_flight:
                    sequence.is_behind = False
                    sequence.num_planned = end
        for sequence in step.forked:
            if sequence.status is Status.RUNNING:
                if sequence.seq_id in result.deferred:
                    sequence.num_committed = self._defer(sequence)
                    sequence.num_kept = min(sequence.num_kept, sequence.num_committed // block_size)
                    if not sequence.num_in_flight:
                        sequence.is_behind, sequence.num_planned = False, sequence.num_committed
                # its blocks are those that its parent had before it was committed
                self._requests.share_known(sequence, sequence.num_kept)
        for sample in result.samples:
            self._take_sample(sample, stops.get(sample.seq_id), now)
        if self._prefilled:
            self._hand_over(now)
        for seq_id, message in result.failures.items():
            reason = FinishReason.UNSUPPORTED if seq_id in result.unsupported else FinishReason.ERROR
            self._fail_sequence(seq_id, reason, message, now)
        if step.loads:
            self.kv_loads.commit(step, now)
        for sequence, *_ in step.parts:
            if sequence.status is not Status.RUNNING or not sequence.max_output:
                self._after_step(sequence, now)
        for sequence in step.forked:
            if self._has_windows and sequence.status is Status.RUNNING:  # it forked with all that its parent held in this step
                table_of(sequence).pass_positions(sequence.num_committed)
            self._requests.release_blocks(sequence)
        if step.parts and is_whole:
            elapsed_s = result.elapsed_s - (sum(result.draft_s.values()) if result.draft_s else 0.0)
            self.cost.learn(size, elapsed_s)
            if self._draft_allocator is not None:
                self._draft_allocator.learn(step, size, result, elapsed_s)
        return self.take_events()

    def _defer(self, sequence: SequenceRecord) -> int:
        """Notes that a step did not sample a sequence as it was planned to; returns how many of its positions count as
        computed."""
        sequence.num_pending -= 1
        sequence.is_behind = True
        return len(sequence.token_ids) - 1

    def owners_of(self, plan: StepPlan) -> list[bytes | None]:
        """Returns for whom a plan computes, as often as it has sequences of theirs (`RequestState.owner`)."""
        found = (self._requests.sequences.get(part.seq_id) for part in plan.sequences)
        return [sequence.request_state.owner for sequence in found if sequence is not None]

    def note_encoded(self, image: EncodedImage, now: float) -> None:
        """Notes that an image is encoded, so that plans may reach it; or ends its request if that failed."""
        if image.error:
            self._fail_sequence(image.seq_id, FinishReason.ERROR, image.error, now)
        else:
            self._encodings.note(image.seq_id, image.offset)

    def _land(self, step: PlannedStep) -> None:
        """Counts a step as no longer in flight."""
        for sequence, *_ in step.parts:
            sequence.num_in_flight -= 1
            sequence.num_drafts = 0
        for sequence in step.forked:
            sequence.num_in_flight -= 1
        self.pool.release([source for source, _ in step.plan.copies])

    # Filling a step

    def _fill(self, step: PlannedStep) -> None:
        """Level by level: waiting sequences of more urgent levels, then decodes, then prefill in the remaining time."""
        step.may_admit = self._policy.begin_step(step.now)
        by_level: dict[int, tuple[list[SequenceRecord], list[SequenceRecord]]] = {}
        level_of = self._policy.level
        for sequence in self._requests.running.values():
            num_wanted = sequence.num_wanted
            if num_wanted > 0 and (not sequence.request_state.request.images or self._encodings.fit(sequence, num_wanted)):
                level = level_of(sequence)
                if level not in by_level:
                    by_level[level] = ([], [])
                is_prefill = num_wanted > 1 or (self.kv_loads.loading and self.kv_loads.find_of(sequence) is not None)
                by_level[level][bool(is_prefill)].append(sequence)
        for level in sorted(by_level):
            self._admit(step, before=level)
            step.enter(level)
            decodes, prefills = by_level[level]
            if step.plan.arrivals:  # some may have been preempted, and have started again in this step
                started = {new.seq_id for new in step.plan.arrivals}
                decodes, prefills = ([s for s in part if s.seq_id not in started] for part in (decodes, prefills))
            self._fill_decodes(step, decodes, prefills)
            for sequence in sorted(prefills, key=self._policy.rank):
                self._extend_chunk(step, sequence)
        self._admit(step, before=None)
        if self._encodings.sequences:
            step.plan.encodes = self._encodings.begin(lambda sequence: (level_of(sequence), self._policy.rank(sequence)))

    def _fill_decodes(self, step: PlannedStep, decodes: list[SequenceRecord], prefills: list[SequenceRecord]) -> None:
        """Plans one position for each sequence, which then limits the time of the rest of the step.

        Args:
            prefills: prefills that follow in this level, besides waiting sequences.
        """
        if len(decodes) > step.budget.num_left:
            decodes = sorted(decodes, key=self._policy.rank)
        choices: list[DraftDecision] = []
        if not step.yields_to_prefill:
            decodes = [sequence for sequence in decodes if sequence.status is Status.RUNNING]  # some may have been preempted
            plain = step.budget.size.plus_decodes([sequence.num_planned for sequence in decodes])
            is_burst = bool(prefills or self._requests.num_waiting) and self._are_of_burst(step, prefills)
            step.budget.bound_by_decodes(plain, BURST_FLOOR_S if is_burst else 0.0)
            if self._draft_allocator is not None:
                choices = self._draft_allocator.choose(step, decodes, plain)
        for place, sequence in enumerate(decodes):
            if step.yields_to_prefill and not step.budget.admits(sequence.num_planned):
                return
            self._extend(step, sequence, 1, choices[place] if choices else NO_DRAFTS)

    def _are_of_burst(self, step: PlannedStep, prefills: list[SequenceRecord]) -> bool:
        """True if all decoding sequences, of any level, have just begun and arrived in one burst with prompts that are not
        computed yet.

        No stream has been read for long then, so the prompts of the burst are computed in a few large chunks.
        """
        pending = [sequence.request_state.arrival_s for sequence in prefills]
        if (first := self._policy.peek()) is not None:
            pending.append(first.request_state.arrival_s)
        if not pending:
            return False
        since_s, young_s = min(pending) - BURST_S, step.now - BURST_LASTS_S
        for sequence in self._requests.running.values():
            state = sequence.request_state
            if state.first_token_s is not None and (state.arrival_s < since_s or state.first_token_s < young_s):
                return False
        return True

    def _extend_chunk(self, step: PlannedStep, sequence: SequenceRecord) -> None:
        """Plans as much prefill of a running sequence as fits; the step's first chunk is never refused for time."""
        if sequence.request_state.request.documents is not None:
            while known := self._requests.find_known_document(sequence):  # behind one that was not cached
                self._requests.take_cached(sequence, known, step.now)
        num_most, strict = sequence.max_chunk, step.prefill_level is not None
        if self.kv_restores is not None and self.kv_loads.loading:
            num_most = self.kv_restores.two_sided.limit(sequence, num_most, step.now)
        has_images = bool(sequence.request_state.request.images)
        if sequence.request_state.prefill_only and self.pool.state_group is None and not has_images:
            num_most = cut_prompt(sequence.num_planned, num_most, self.pool.block_size)
        if has_images and not (num_most := self._encodings.fit(sequence, num_most)):
            return
        num_tokens = step.budget.fit(sequence.cost_start, num_most, strict=strict)
        if has_images:
            num_tokens = step.keep_images_whole(sequence, num_tokens, strict=strict)
        if num_tokens and self._extend(step, sequence, num_tokens) and step.prefill_level is None:
            step.prefill_level = self._policy.level(sequence)

    def _admit(self, step: PlannedStep, before: int | None) -> None:
        """Admits waiting sequences while there is capacity for them.

        Args:
            before: only those of a more urgent level than this.
        """
        while step.may_admit and step.budget.num_left > 0:
            sequence = self._policy.peek()
            if sequence is None or (before is not None and self._policy.level(sequence) >= before):
                return
            step.enter(self._policy.level(sequence))
            if not self._make_room(step, sequence):
                if self._policy.pass_over(sequence):
                    continue
                return
            keys, layerwise = self._requests.match_keys(sequence), self._layerwise_of(sequence)
            read = None
            if self.kv_restores is not None and layerwise is None and sequence.request_state.request.documents is None:
                read = self.kv_restores.find(sequence, keys)
            hits = self.prefix_cache.match(keys) if self.prefix_cache is not None else []
            if layerwise is not None:
                hits = hits[: layerwise.count_hits(sequence, len(hits))]
            num_hit = len(hits) // self.pool.num_groups * self.pool.block_size
            if not step.budget.fit(num_hit, len(sequence.token_ids) - num_hit, strict=step.prefill_level is not None):
                return
            self.pool.share(block for block in hits if block != NO_BLOCK)
            sequence.table = BlockTable(self.pool, hits)
            if not self._reserve(step, sequence):
                sequence.table.close()
                sequence.table = None
                if self._policy.pass_over(sequence):
                    continue
                return
            if read is not None and read.restore is None:
                self._restore(sequence, read, step.now)
                continue
            if layerwise is not None:
                layerwise.begin(sequence, len(hits))
            self._start(step, sequence, num_hit)
            if read is not None and self.kv_restores is not None:
                self.kv_restores.begin(sequence, read, step.now)
            self._extend_chunk(step, sequence)

    def _restore(self, sequence: SequenceRecord, read: TierRead, now: float) -> None:
        """Lets a waiting sequence wait for KV from a tier."""
        assert self.kv_restores is not None
        assert sequence.table is not None
        self._policy.pop()
        self._requests.num_waiting -= 1
        sequence.table.close()
        sequence.table = None
        self.kv_loads.settle(sequence.request_state.request.request_id)
        self.kv_restores.begin(sequence, read, now)

    def _make_room(self, step: PlannedStep, sequence: SequenceRecord) -> bool:
        """Frees slots for a waiting sequence, by preempting others if the policy permits it."""
        num_taken = sum(s.num_slots for s in self._requests.running.values())
        while num_taken + sequence.num_slots > self.config.max_num_seqs:
            victim = self._choose_victim(step, behind=sequence)
            if victim is None:
                return False
            num_taken -= victim.num_slots
            self._requests.preempt(victim, step.now)
        return True

    def _reserve(self, step: PlannedStep, sequence: SequenceRecord) -> bool:
        """True if the pool can hold all known tokens of the sequence, in addition to what running prompts still need."""
        needed = own = self._count_needed(sequence, table_of(sequence))
        if self.kv_loads.loading:
            needed = [sum(counts) for counts in zip(own, self.kv_loads.count_promised(), strict=True)]
        while self._requests.running:
            missing = [self.kv_loads.count_missing(s) for s in self._requests.running.values()]
            headroom = len(missing)  # one entry each, so that admission does not cause a preemption one step later
            promised = [sum(counts) for counts in zip(needed, self._searches.count_promised(), strict=True)]
            if self.pool.has_room(missing, headroom, promised):
                return True
            victim = self._choose_victim(step, behind=sequence)
            if victim is None:
                return False
            self._requests.preempt(victim, step.now)
        while not self.pool.has_room([], 0, needed):
            if self.kv_loads.is_restoring or not self.kv_loads.give_up_one(step.now):
                return False  # what is loading ends soon
            if self.kv_loads.loading:
                needed = [sum(counts) for counts in zip(own, self.kv_loads.count_promised(), strict=True)]
        return True

    def _would_fit(self, sequence: SequenceRecord, leaving: Collection[SequenceRecord]) -> bool:
        """Whether a waiting sequence would have slots and blocks if these running ones left. Counts on no prefix hits."""
        gone = {s.seq_id for s in leaving}
        staying = [s for s in self._requests.running.values() if s.seq_id not in gone]
        if sum(s.num_slots for s in staying) + sequence.num_slots > self.config.max_num_seqs:
            return False
        freed = [0] * self.pool.num_groups
        for block in {block for s in leaving for block in table_of(s).blocks if block != NO_BLOCK}:
            freed[self.pool.group_of(block)] += self.pool.references(block) == 1
        needed = [a - b for a, b in zip(self._count_needed(sequence, BlockTable(self.pool)), freed, strict=True)]
        missing = [self.kv_loads.count_missing(s) for s in staying]
        promised = [sum(counts) for counts in zip(needed, self._searches.count_promised(), strict=True)]
        return self.pool.has_room(missing, len(missing), promised)

    def _count_needed(self, sequence: SequenceRecord, table: BlockTable) -> list[int]:
        """Returns the blocks of each group that a waiting sequence needs beside those of the prefix that it found, in
        `table`."""
        state = sequence.request_state
        if state.beams is not None:
            return self._searches.count_blocks(state)
        if (layerwise := self._layerwise_of(sequence)) is not None:
            return [layerwise.count_needed(sequence, table.num_entries)]
        num_most = count_positions(state.num_prompt_tokens, sequence.max_output)
        num_entries = -(-min(len(sequence.token_ids) + 1, num_most) // self.pool.block_size)
        groups = range(self.pool.num_groups)
        return [max(0, self.pool.count_most(group, num_entries) - table.count_held(group)) for group in groups]

    def _start(self, step: PlannedStep, sequence: SequenceRecord, num_hit: int) -> None:
        """Moves a waiting sequence to running and introduces it to the runner."""
        self._policy.pop()
        self._requests.num_waiting -= 1
        self.kv_loads.settle(sequence.request_state.request.request_id)
        sequence.num_planned = sequence.num_committed = num_hit
        self._requests.run(sequence)
        if sequence.request_state.request.images:
            self._encodings.join(sequence)
        sequence.num_kept = num_hit // self.pool.block_size
        sequence.snapshots = self._requests.choose_snapshots(sequence)
        state = sequence.request_state
        if num_hit and self.kv_restores is not None and state.kept_root:
            self.kv_restores.tiers.note_accesses(sequence.keys[: sequence.num_kept], state.owner)
        self._requests.renew(sequence, step.now)
        resumed = state.scheduled_s is not None
        if not resumed:
            state.scheduled_s = step.now
            state.num_cached_tokens = num_hit
        self._requests.events.append(
            Scheduled(
                request_id=state.request.request_id,
                now_s=step.now,
                queue_s=step.now - state.arrival_s,
                num_cached_tokens=num_hit,
                num_prompt_tokens=state.num_prompt_tokens,
                resumed=resumed,
                num_queried_tokens=state.num_prompt_tokens if self._requests.reads_prefixes(state.request) else 0,
            )
        )
        step.plan.arrivals.append(introduce(sequence))

    def _extend(self, step: PlannedStep, sequence: SequenceRecord, num_tokens: int, choice: DraftDecision = NO_DRAFTS) -> bool:
        """Puts the next `num_tokens` positions of a running sequence into the plan, followed by its drafts, and preempts others
        for blocks if needed."""
        num_left = step.budget.num_left - num_tokens
        if sequence.status is not Status.RUNNING or num_left < 0:
            return False
        num_drafts = choice.num_drafts if choice.num_drafts <= num_left else num_left
        start = sequence.num_planned
        end = start + num_tokens + num_drafts
        table = table_of(sequence)
        if not table.is_writable(start, end) and not self._grow(step, sequence, table, start, end):
            return False
        num_known = len(sequence.token_ids) + sequence.num_pending
        is_decode = start == num_known - 1
        samples = int(end == num_known + num_drafts and sequence.max_output > 0)
        is_watched = choice.is_watched
        if self._draft_allocator is not None and samples and not sequence.is_layerwise:
            # the end of a prompt may be a single position
            is_watched = is_watched or not is_decode or not sequence.num_output
        if sequence.is_unknown:
            sequence.is_unknown = False
            step.plan.arrivals.append(introduce(sequence))
        table_start, new_blocks = table.take_unsent()
        step.plan.sequences.append(
            SequencePlan(
                seq_id=sequence.seq_id,
                start=start,
                num_tokens=num_tokens + num_drafts,
                table_start=table_start,
                new_block_ids=new_blocks,
                num_samples=samples,
                num_drafts=num_drafts,
                drafter=choice.drafter if num_drafts else "",
                parents=choice.parents[:num_drafts] if num_drafts and choice.parents is not None else None,
                is_watched=is_watched,
                layerwise=sequence.layerwise,
            )
        )
        if num_drafts:
            step.choices[sequence.seq_id] = choice._replace(num_drafts=num_drafts)
            sequence.num_drafts = num_drafts
        step.parts.append((sequence, start, end, 0 if is_decode else num_tokens))
        step.budget.spend(start if sequence.layerwise is None else sequence.cost_start, num_tokens + num_drafts)
        sequence.num_planned = end
        sequence.num_in_flight += 1
        if samples:
            sequence.num_pending += 1
            if sequence.request_state.num_open > 1 and sequence.request_state.beams is None:
                self._fork(step, sequence)
        return True

    def _grow(self, step: PlannedStep, sequence: SequenceRecord, table: BlockTable, start: int, end: int) -> bool:
        """Makes positions [start, end) writable; returns False if the blocks are not available in this step."""
        snapshots = [] if self.pool.state_group is None else self._snapshots_within(sequence, start, end)
        while True:
            try:
                step.plan.copies.extend(table.grow(start, end, snapshots))
                return True
            except OutOfBlocksError:
                if snapshots:
                    snapshots = []
                    continue
                if self.kv_loads.give_up_one(step.now):
                    continue
                victim = self._choose_victim(step, behind=None)
                if victim is None:
                    return False
                self._requests.preempt(victim, step.now)
                if victim is sequence or victim.num_in_flight:
                    return False  # its blocks are released when the plans that name it are committed

    def _snapshots_within(self, sequence: SequenceRecord, start: int, end: int) -> list[int]:
        """Returns the entries inside of positions [start, end) that shall get a block for the state at their end.

        They take blocks that nobody needs: a running sequence needs two at most.
        """
        size, group = self.pool.block_size, self.pool.state_group
        if group is None or self.pool.count_available(group) <= 2 * len(self._requests.running):
            return []
        return [number - 1 for number in sequence.snapshots if start < number * size < end]

    def _fork(self, step: PlannedStep, parent: SequenceRecord) -> None:
        """Forks the request's other sequences from the one that has just computed the prompt, into slots that are free.

        The others are queued, and find the prompt in the prefix cache when they have a slot. If a request waited for slots of
        all its answers, those behind it would wait until as many had ended.
        """
        state = parent.request_state
        num_free = self.config.max_num_seqs - sum(s.num_slots for s in self._requests.running.values())
        for index in range(len(state.sequences), state.request.sampling.n):
            child = self._requests.make_sequence(state, index, list(parent.token_ids), parent.max_output)
            num_free -= 1
            if num_free < 0:
                self._requests.wait(child)
                continue
            child.table = table_of(parent).fork()
            child.num_planned = parent.num_planned
            child.num_committed = parent.num_planned
            child.num_kept = parent.num_planned // self.pool.block_size
            child.num_pending = 1
            child.num_in_flight = 1
            self._requests.run(child)
            step.forked.append(child)
            step.plan.forks.append(Fork(parent.seq_id, child.seq_id, index))

    def _choose_victim(self, step: PlannedStep, behind: SequenceRecord | None) -> SequenceRecord | None:
        """Returns the least urgent running sequence that is not in this step.

        Args:
            behind: only a sequence that the policy allows this waiting one to preempt.
        """
        planned = step.planned()
        choices = [
            s
            for s in self._requests.running.values()
            if s.seq_id not in planned
            and s.request_state.beams is None
            and (behind is None or self._policy.displaces(behind, s))
        ]
        return max(choices, key=lambda s: (self._policy.level(s), self._policy.rank(s)), default=None)

    # Committing a step

    def _take_sample(self, sample: Sample, stop: Stop | None, now: float) -> None:
        sequence = self._requests.sequences.get(sample.seq_id)
        if sequence is None or sequence.status is Status.ENDED:
            return
        sequence.num_pending -= 1
        state = sequence.request_state
        if state.beams is not None:
            self._searches.collect(sequence, state.beams, sample, now)
            return
        num_left = sequence.max_output + state.num_prompt_tokens - len(sequence.token_ids)
        token_ids = sample.token_ids[: num_left if stop is None else min(num_left, stop.num_tokens)]
        sequence.token_ids += token_ids
        if sample.accepted and sequence.status is Status.RUNNING:
            self._requests.keep_blocks(sequence)  # their tokens were unknown when the positions were committed
        first = state.first_token_s is None
        if first:
            state.first_token_s = now
        self._requests.events.append(
            Progressed(state.request.request_id, sequence.seq_id, sequence.index, now, len(token_ids), first)
        )
        if stop is not None:
            self._requests.end(sequence, FinishReason.STOP, now, stop_reason=stop.reason)
        elif len(token_ids) >= num_left:
            self._requests.end(sequence, FinishReason.LENGTH, now)
        if state.prefill_only:
            self._prefilled.append(sequence)

    def _hand_over(self, now: float) -> None:
        """Lets the requests go whose first token another engine waits for."""
        prefilled, self._prefilled = self._prefilled, []
        for sequence in prefilled:
            if sequence.status is not Status.ENDED:
                self._requests.hand_over(sequence.request_state, now)

    def _after_step(self, sequence: SequenceRecord, now: float) -> None:
        """Ends a request that needs only its prompt computed, or releases the blocks of a sequence that left while the step
        ran."""
        is_done = not sequence.max_output and sequence.num_committed >= len(sequence.token_ids)
        if sequence.status is Status.RUNNING and is_done:
            is_whole = sequence.request_state.request.pooling is not None  # the pooled vector is the answer
            self._requests.end_request(sequence.request_state, FinishReason.STOP if is_whole else FinishReason.LENGTH, now)
        self._requests.release_blocks(sequence)

    def _fail_sequence(self, seq_id: int, reason: FinishReason, message: str, now: float) -> None:
        sequence = self._requests.sequences.get(seq_id)
        if sequence is not None and sequence.status is not Status.ENDED:
            self._requests.end_request(sequence.request_state, reason, now, error=message)
